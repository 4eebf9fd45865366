"""What OneTrainer's configurations say of captions and sample prompts, for each family of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prep.dataset.texts import text_options_of
from prep.models.families.registry import FAMILIES
from prep.recipe.convert.detect import convert
from prep.recipe.convert.draft import Draft, Layer, ToolConfig
from prep.recipe.convert.onetrainer.family import family_of
from prep.recipe.prompts import prompts_of

OF_FAMILIES = {
    "STABLE_DIFFUSION_15": "sd15", "STABLE_DIFFUSION_21": "sd21", "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
    "STABLE_DIFFUSION_35": "sd3", "PIXART_SIGMA": "pixart_sigma", "FLUX_DEV_1": "flux", "FLUX_2": "flux2",
    "SANA": "sana", "HI_DREAM_FULL": "hidream", "CHROMA_1": "chroma", "QWEN": "qwenimage", "Z_IMAGE": "zimage",
    "KREA_2": "krea2", "ERNIE": "ernie", "ANIMA": "anima",
    "STABLE_DIFFUSION_15_INPAINTING": "sd15_inpaint", "STABLE_DIFFUSION_20_INPAINTING": "sd21_inpaint",
    "STABLE_DIFFUSION_XL_10_BASE_INPAINTING": "sdxl_inpaint", "FLUX_FILL_DEV_1": "flux_fill"}


def converted(folder, **values):
    (folder / "img").mkdir(exist_ok=True)
    (folder / "o.json").write_text(json.dumps({"concepts": [{"path": "img"}], **values}))
    return convert(folder / "o.json")


@pytest.mark.parametrize("kind", OF_FAMILIES)
def test_a_family_gets_no_setting_of_captions_that_encode_refuses(tmp_path, kind):
    family = FAMILIES[OF_FAMILIES[kind]]
    found = converted(tmp_path, model_type=kind, text_encoder_layer_skip=2, text_encoder_2_layer_skip=2,
                      text_encoder_sequence_length=9000, text_encoder_2_sequence_length=9000)
    text_options_of(family, found.recipe.model, lambda part: {})
    assert (found.recipe.model.clip_skip == 2) == family.text.clip
    said = {one.key: one.said for one in found.training.notes}
    assert family.text.clip or said["text_encoder_layer_skip"] == (
        f"models of family '{family.name}' have no [model] clip_skip; not written")
    assert (found.recipe.model.max_length == family.text.longest) == (family.name in ("flux", "flux_fill", "flux2"))


@pytest.mark.parametrize(("kind", "family"), [*OF_FAMILIES.items(), ("STABLE_DIFFUSION_20_DEPTH", ""),
                                              ("STABLE_DIFFUSION_20", "sd21"), ("STABLE_DIFFUSION_20_BASE", "sd21")])
def test_models_are_of_our_families(kind, family):
    config = ToolConfig(draft=Draft(tool="onetrainer", base=Path(), trains=True),
                        layers=[Layer(table={"model_type": kind}, where="")])
    assert family_of(config) == family


def test_the_length_of_flux_captions_is_onetrainers_default(tmp_path):
    assert converted(tmp_path, model_type="FLUX_DEV_1").recipe.model.max_length == 77
    assert converted(tmp_path, model_type="CHROMA_1").recipe.model.max_length == 0


SAMPLES = [{"prompt": "a star\nat night", "negative_prompt": "dull", "width": 1000, "height": 768, "seed": 7,
            "diffusion_steps": 20, "cfg_scale": 7.0, "enabled": True},
           {"prompt": "a moon", "random_seed": True, "seed": 4, "cfg_scale": 0}, {"prompt": "no", "enabled": False}]
LINES = "a star at night --n dull --w 1000 --h 768 --s 20 --d 7 --l 7\na moon --l 1\n"


def test_samples_become_prompts(tmp_path):
    assert converted(tmp_path, samples=SAMPLES).prompts == LINES and not prompts_of(LINES.encode(), tmp_path, "x")[1]
    (tmp_path / "samples.json").write_text(json.dumps(SAMPLES))
    assert converted(tmp_path, sample_definition_file_name="samples.json").prompts == LINES
    found = converted(tmp_path, sample_definition_file_name="nowhere.json")
    assert not found.prompts and "sample_definition_file_name" in {one.key for one in found.notes}
    assert not converted(tmp_path, samples=[{"prompt": ""}, 3]).prompts


@pytest.mark.parametrize(("kind", "wanted"), [
    ("FLUX_DEV_1", "schedule"), ("QWEN", "schedule"), ("STABLE_DIFFUSION_35", "none"), ("CHROMA_1", "none"),
    ("STABLE_DIFFUSION_XL_10_BASE", "none")])
def test_a_shift_by_size_is_of_some_models(tmp_path, kind, wanted):
    found = converted(tmp_path, model_type=kind, dynamic_timestep_shifting=True, timestep_shift=2.0)
    assert found.training.settings.get("timesteps.shift_by_size", "none") == wanted
    assert found.training.settings.get("timesteps.shift", 1.0) == (1.0 if wanted == "schedule" else 2.0)


@pytest.mark.parametrize(("kind", "step", "size"), [
    ("STABLE_DIFFUSION_15", 8, "1000x776"), ("STABLE_DIFFUSION_XL_10_BASE", 64, "1024x768"), ("SANA", 32, "992x768"),
    ("PIXART_SIGMA", 16, "992x784"), ("QWEN", 64, "1024x768")])
def test_sides_of_buckets_are_multiples_of_onetrainers(tmp_path, kind, step, size):
    image = converted(tmp_path, model_type=kind, resolution="1000x778").recipe.image
    assert (image.step, image.sizes) == (step, (size,))
