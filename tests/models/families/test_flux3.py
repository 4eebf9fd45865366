"""FLUX.3's text rows, whose windows are part of them; its modular repository; the distilled model, which is refused."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import ClassifierFreeGuidance, Flux3AutoBlocks
from diffusers.modular_pipelines.flux3 import prompt_upsampler
from model_files import change_json
from original_layout import FLUX3, published
from safetensors.torch import load_file, save_file

from prep.errors import ModelError
from prep.models.configs import Configs, pipeline_index
from prep.models.families import flux3
from prep.models.families.flux3 import FAMILY, LAYERS, MOST, SCALE, WINDOW
from prep.models.family import ATTENTION_MASK, Conditions, TextOptions
from prep.models.fingerprint import text_fingerprint, vae_fingerprint
from prep.models.pipeline import infer_family, open_single, schedule_in_code, scheduler_config, weighted_files
from prep.models.text.encoder import TextEncoder
from prep.models.text.lengths import LengthCounter
from prep.models.vae import load_vae

OPTIONS = TextOptions(max_length=FAMILY.text.max_length)
# With the template's 19 tokens: of one window, of two, of one exactly, and longer than is read.
CAPTIONS = ["a red cat", "two dogs on a long green bench, " * 3, "", "x" * 61, "a very long caption. " * 60]
STEM = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipelines.save("flux3", tmp_path_factory.mktemp("flux3") / "model")


@pytest.fixture(scope="module")
def pipeline(model) -> Any:
    return tiny_pipelines.load(model)


def encoder_of(model: Path, **options: int) -> TextEncoder:
    return TextEncoder(model, FAMILY, TextOptions(**{"max_length": FAMILY.text.max_length, **options}), device="cpu",
                       compute="float32", dtype="float32")


def step(blocks: Any, name: str) -> Any:
    """The first block of this class inside of others."""
    waiting = [blocks]
    for block in waiting:
        if type(block).__name__ == name:
            return block
        waiting += block.sub_blocks.values()
    raise KeyError(name)


def test_constants_are_the_pipeline_s():
    blocks = Flux3AutoBlocks()
    text, times = step(blocks, "Flux3TextEncoderStep"), step(blocks, "Flux3SetTimestepsStep")
    assert next(one.default for one in text.inputs if one.name == "text_encoder_out_layers") == LAYERS
    assert text.pad_multiple == WINDOW and "masked_fill(attention_mask == 0, 1)" in inspect.getsource(type(text))
    for name in ("Flux3PrepareLatentsStep", "Flux3PrepareImageCondLatentsStep"):
        assert step(blocks, name).image_rope_scale == SCALE
    spec, = times.expected_components
    assert {"_class_name": spec.type_hint.__name__, **spec.config} == FAMILY.schedule
    assert step(blocks, "Flux3LoopDenoiser").guidance_scale == FAMILY.sampling.guidance
    assert prompt_upsampler.MAX_REFERENCES == MOST and FAMILY.text.longest > prompt_upsampler.MAX_NEW_TOKENS
    assert FAMILY.text.constants == {"layers": "4,8,12,16,20,24,28,32", "window": 80, "padding_position": 1}
    assert FAMILY.text.max_length % WINDOW == FAMILY.text.longest % WINDOW == 0


@pytest.mark.parametrize("longest", [FAMILY.text.max_length, 100])
def test_rows_of_a_batch_are_those_of_the_pipeline_for_each_caption(model, pipeline, longest):
    """Also where a window is cut short."""
    rows = encoder_of(model, max_length=longest).encode(CAPTIONS)
    counter = LengthCounter(model, FAMILY, TextOptions(max_length=longest))
    text, lengths = step(pipeline.blocks, "Flux3TextEncoderStep"), []
    for caption, row, group in zip(CAPTIONS, rows, counter.groups(CAPTIONS), strict=True):
        with torch.no_grad():
            wanted = text._get_qwen3_vl_prompt_embeds(pipeline.text_encoder, pipeline.tokenizer, caption,
                                                      max_sequence_length=longest)[0]
        assert row["hidden"].shape == wanted.shape and row[ATTENTION_MASK].all()
        assert np.allclose(row["hidden"], wanted.numpy(), atol=1e-5), caption
        lengths.append(len(wanted))
        assert group == -(-len(wanted) // 16) * 16
    assert lengths == [80, 160 if longest > 160 else 100, 80, 80, longest]


def test_the_window_is_an_input_of_the_transformer(model, pipeline):
    """Rows without their padding, or with that of another window, are others."""
    hidden = torch.from_numpy(encoder_of(model).encode(["a red cat"])[0]["hidden"])[None]
    latent, answers = torch.randn(1, 32, 4, 4, generator=torch.Generator().manual_seed(0)), []
    for length in (80, 42, 48):
        text = {"hidden": hidden[:, :length], ATTENTION_MASK: torch.ones(1, length, dtype=torch.uint8)}
        with torch.no_grad():
            answers.append(FAMILY.predict(pipeline.transformer, latent, torch.tensor([0.5]),
                                          Conditions(text=text, sizes_B6=torch.zeros(1, 6))))
    assert not torch.allclose(answers[0], answers[1], atol=1e-4)
    assert not torch.allclose(answers[1], answers[2], atol=1e-4)


def test_guidance_is_set_and_1_is_off(pipeline):
    for scale in (1.0, 4.0):
        flux3.prepare(pipeline, SimpleNamespace(guidance=scale))
        assert isinstance(pipeline.guider, ClassifierFreeGuidance) and pipeline.guider.guidance_scale == scale
        assert pipeline.requires_unconditional_embeds == (scale != 1)


# ---- the repository --------------------------------------------------------------------------------------------------


def test_a_published_index_names_the_processor_by_another_class(model, tmp_path):
    """Components that were not loaded before the index was saved have the classes that the blocks ask for."""
    copy = shutil.copytree(model, tmp_path / "model")
    index = json.loads((copy / "modular_model_index.json").read_bytes())
    hint = {**index["tokenizer"][2], "type_hint": ["transformers", "AutoProcessor"]}
    absent = {"pretrained_model_name_or_path": "owner/upsampler", "subfolder": "", "type_hint": ["transformers", "X"]}
    unloaded = {name: value[2] for name, value in index.items() if isinstance(value, list)}
    change_json(copy / "modular_model_index.json", **{name: [None, None, value] for name, value in {
        **unloaded, "tokenizer": hint, "prompt_upsampler": absent}.items()})
    assert pipeline_index(copy)["tokenizer"] == ["transformers", "AutoProcessor"]
    assert infer_family(copy) == "flux3"
    assert text_fingerprint(copy) == text_fingerprint(model) and vae_fingerprint(copy) == vae_fingerprint(model)
    rows = [encoder_of(each).encode(["a red cat"])[0]["hidden"] for each in (model, copy)]
    assert np.array_equal(*rows)


def test_the_schedule_is_in_the_code_unless_the_index_names_one(model, tmp_path):
    assert scheduler_config(model) == schedule_in_code(model) == dict(FAMILY.schedule)
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / "scheduler").mkdir()
    (copy / "scheduler" / "scheduler_config.json").write_text('{"shift": 2.0}')
    assert scheduler_config(copy)["shift"] == 6.93, "as diffusers, which the index alone tells of it"
    kind = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    change_json(copy / "modular_model_index.json", scheduler=[*kind, {"subfolder": "scheduler", "type_hint": kind}])
    assert schedule_in_code(copy) is None and scheduler_config(copy) == {"shift": 2.0}


def test_the_vae_of_another_repository_is_to_be_downloaded(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "model")
    shutil.rmtree(copy / "vae")
    with pytest.raises(ModelError) as caught:
        load_vae(copy, torch.float32)
    assert caught.value.hint == ("modular_model_index.json says that it is 'vae' of 'someone/flux3': download that "
                                 f"into {copy / 'vae'}")


# ---- the distilled model ---------------------------------------------------------------------------------------------

DISTILLED = ("{} was distilled to few steps: its denoiser is also told where each step ends, and cannot be trained")
HINT = "name the model that it was distilled from: of FLUX.3 klein, klein-base"


def test_the_distilled_model_is_refused(tmp_path, prep):
    klein = tiny_pipelines.save("flux3", tmp_path / "klein", flow_map=True)
    assert pipeline_index(klein)["_class_name"] == "Flux3DistilledModularPipeline"
    with pytest.raises(ModelError) as caught:
        infer_family(klein)
    assert (caught.value.message, caught.value.hint) == (DISTILLED.format(klein), HINT)
    change_json(klein / "modular_model_index.json", _class_name="Flux3ModularPipeline",
                _blocks_class_name="Flux3AutoBlocks")
    with pytest.raises(ModelError) as caught:
        weighted_files(klein, "transformer")
    assert (caught.value.message, caught.value.hint) == (DISTILLED.format(klein), HINT)
    (tmp_path / "photos").mkdir()
    result = prep("encode", tmp_path / "photos", "--model", klein, "--cache", tmp_path / "c", "-o", tmp_path / "m.json")
    assert result.code == 6 and DISTILLED.format(klein) in result.err


@pytest.mark.parametrize("lines", ["", FLUX3 + "ref_time_in.in_layer = target_timestep_embedder.linear_1\n"
                                   "ref_time_in.out_layer = target_timestep_embedder.linear_2\n"])
def test_a_file_of_the_distilled_model_is_refused(model, tmp_path, lines):
    klein, file = tiny_pipelines.build("flux3", flow_map=True), tmp_path / "klein.safetensors"
    save_file({name: value.contiguous() for name, value in published(
        klein.transformer.state_dict(), lines).items()}, file)
    with pytest.raises(ModelError) as caught:
        open_single(file, model)
    assert (caught.value.message, caught.value.hint) == (DISTILLED.format(file), HINT)


def test_a_file_of_the_base_is_told_by_its_names(model, tmp_path):
    file = tmp_path / "base.safetensors"
    save_file({name: value.contiguous() for name, value in published(
        load_file(model / "transformer" / STEM), FLUX3).items()}, file)
    assert open_single(file, model).path == file
    with pytest.raises(ModelError, match=r"is of family 'flux3', but .* is of family 'flux2_klein'"):
        open_single(file, tiny_pipelines.save("flux2_klein", tmp_path / "klein"))


def test_widths_are_read_of_the_config(model):
    assert FAMILY.text.shapes(Configs(model), OPTIONS) == {"hidden": (1040, 256)}
