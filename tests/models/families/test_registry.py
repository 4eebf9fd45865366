"""Each pipeline directory belongs to one family, also where several families share a pipeline class."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prep.errors import ModelError
from prep.models.configs import Configs
from prep.models.families.registry import FAMILIES, families_of_pipeline
from prep.models.family import Prompted
from prep.models.pipeline import infer_family

INDEX = {"_class_name": "StableDiffusionPipeline"}
SD15 = {"cross_attention_dim": 768, "attention_head_dim": 8}  # the published configs, as far as they matter
SD21 = {"cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "use_linear_projection": True}


def directory(root: Path, **unet: object) -> Path:
    (root / "unet").mkdir(parents=True)
    (root / "unet" / "config.json").write_text(json.dumps(unet))
    (root / "model_index.json").write_text(json.dumps(INDEX))
    return root


def test_families_that_share_a_pipeline_class_tell_their_models_apart():
    classes = Counter(pipeline for family in FAMILIES.values() for pipeline in family.pipelines)
    for pipeline, count in classes.items():
        families = families_of_pipeline(pipeline)
        assert len(families) == count
        assert count == 1 or all(family.fits is not None for family in families.values()), pipeline
    assert families_of_pipeline("OtherPipeline") == families_of_pipeline(None) == families_of_pipeline([]) == {}


def test_only_families_with_clip_alone_compute_text_in_the_dtype_of_the_rows():
    found = {name: family.text_compute for name, family in FAMILIES.items()}
    assert {found.pop(name) for name in (
        "sd15", "sd15_inpaint", "sd21", "sd21_inpaint", "sdxl", "sdxl_inpaint")} == {None}
    assert set(found.values()) == {"bfloat16"}


@pytest.mark.parametrize(("unet", "family"), [
    (SD15, "sd15"), ({**SD15, "use_linear_projection": False}, "sd15"), ({**SD15, "class_embed_type": None}, "sd15"),
    (SD21, "sd21"), ({**SD21, "upcast_attention": True}, "sd21"),
])
def test_stable_diffusion_1_and_2_are_told_apart_by_the_unet(unet, family, tmp_path):
    model = directory(tmp_path / "model", **unet)
    assert infer_family(model) == family
    fitting = [one.name for one in families_of_pipeline("StableDiffusionPipeline").values() if one.fits(Configs(model))]
    assert fitting == [family]


def test_a_modular_pipeline_of_no_family_has_a_repository_of_another_kind(tmp_path):
    (tmp_path / "modular_model_index.json").write_text(json.dumps({"_class_name": "Flux2KleinModularPipeline"}))
    with pytest.raises(ModelError) as caught:
        infer_family(tmp_path)
    assert caught.value.message == f"{tmp_path} is a Flux2KleinModularPipeline, which belongs to no known family"
    assert caught.value.hint.endswith("name a repository of the model with model_index.json: most have one")


@pytest.mark.parametrize("odd", [{"class_embed_type": "projection"}, {"addition_embed_type": "text_time"},
                                 {"encoder_hid_dim_type": "text_proj"}, {"num_class_embeds": 1000}])
@pytest.mark.parametrize("unet", [SD15, SD21], ids=["sd15", "sd21"])
def test_a_unet_with_further_inputs_is_of_neither_family(unet, odd, tmp_path):
    model = directory(tmp_path / "model", **unet, **odd)
    with pytest.raises(ModelError) as error:
        infer_family(model)
    assert error.value.message == (f"{model} is a StableDiffusionPipeline, but its configs are of no known family: "
                                   "sd15 and sd21 have other inputs")
    assert error.value.exit_code == 6 and error.value.hint.startswith("prep models lists the known families; ")
    with pytest.raises(ModelError, match="but its configs are of no known family"):
        infer_family(model, "sd15")  # naming a family does not make it one


def test_a_directory_without_a_unet_is_told(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps(INDEX))
    with pytest.raises(ModelError, match=r"cannot read .*unet/config\.json"):
        infer_family(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_guides_by_a_number_of_its_denoiser_or_by_a_negative_prompt(name):
    """What `train check` estimates of sample pictures counts on it: a negative prompt takes a second pass."""
    family, sizes = FAMILIES[name], {"token": 4, "channel": 8, "layer": 1, "t5_token": 4, "digit": 2}
    text = {array: torch.zeros(1, *map(sizes.__getitem__, dims)) for array, dims in family.text.arrays.items()}
    text["attention_mask"] = torch.ones(1, 4, dtype=torch.uint8)
    prompted = Prompted(positive=text, negative=text, latent_1Chw=torch.zeros(1, family.latent_channels, 4, 4),
                        size=(32, 32), guidance=2.0)
    transformer = SimpleNamespace(config=SimpleNamespace(llama_layers=[0]))
    given = family.sampling.call(transformer, prompted)
    assert family.takes_guidance != any(value is not None for key, value in given.items() if key.startswith("negative"))
