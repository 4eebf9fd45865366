"""SANA's text rows: the pipeline's instruction before captions but not before negatives, and no padding.

How SANA's transformer is called, and its schedule read, whichever of two schedulers the model names.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from model_files import change_json

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.errors import ConfigError, ModelError
from prep.models.families import sana
from prep.models.families.sana import LORA
from prep.models.family import TextOptions
from prep.models.latents import latent_facts
from prep.models.text.lengths import LengthCounter
from train.config.load import parse
from train.models.denoiser import load, noise_schedule
from train.models.targets import layers_of, read_weights, targeted, trained_shapes

CPU = torch.device("cpu")
LONG = "a caption (with brackets) of many words " * 10


@pytest.fixture(scope="module")
def pipeline() -> object:
    return tiny_pipelines.build("sana")


def rows(encode, pipeline, captions, most=300):
    with torch.no_grad():
        return [row["hidden"] for row in encode(pipeline, captions, TextOptions(max_length=most), CPU)]


def as_called(pipeline, caption):
    """The row and mask that `__call__` makes of a prompt, by the default of its signature."""
    usual = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
    with torch.no_grad():
        hidden, mask, _, _ = pipeline.encode_prompt([caption], False, complex_human_instruction=usual)
    return hidden[0], mask[0].bool()


@pytest.mark.parametrize("caption", ["a cat", "", LONG])
def test_rows_are_those_of_a_prompt_without_padding(pipeline, caption):
    (row,) = rows(sana.encode, pipeline, [caption])
    hidden, mask = as_called(pipeline, caption)
    assert torch.equal(row, hidden[mask]) and not mask[len(row):].any()
    # One more than the caption's own tokens, <bos> included: the last of the instruction.
    assert len(row) == min(300, len(pipeline.tokenizer(caption)["input_ids"]) + 1)


def test_negatives_have_no_instruction(pipeline):
    (plain,), (told,) = (rows(encode, pipeline, ["a cat"]) for encode in (sana.negative, sana.encode))
    with torch.no_grad():
        _, _, hidden, mask = pipeline.encode_prompt(["a dog"], True, negative_prompt="a cat")
        empty = sana.TEXT.unconditional(pipeline, TextOptions(max_length=300), CPU)["hidden"]
    assert torch.equal(plain, hidden[0][mask[0].bool()])
    assert len(plain) == len(told) - 1 and not torch.allclose(plain[1:], told[2:], atol=1e-4)
    assert torch.equal(empty, rows(sana.negative, pipeline, [""])[0])


def test_captions_are_lower_cased(pipeline):
    one, two = rows(sana.encode, pipeline, ["  A (red) CAT\n", "a (red) cat"])
    assert torch.allclose(one, two, atol=1e-6)


def test_another_instruction_of_the_library_is_an_error(pipeline, monkeypatch):
    def other(self, complex_human_instruction=("Describe it.",)):
        return None

    monkeypatch.setattr(type(pipeline), "__call__", other)
    with pytest.raises(ModelError) as error:
        rows(sana.encode, pipeline, ["a cat"])
    assert error.value.message == ("the installed diffusers has another instruction for SANA than diffusers 0.42, with "
                                   "which captions are encoded")
    assert error.value.hint == "install the version that Latentry knows: pip install 'diffusers==0.42.*'"


def test_lengths_are_counted_and_latents_are_the_autoencoder_s(tmp_path: Path):
    model = tiny_pipelines.save("sana", tmp_path / "model")
    counter = LengthCounter(model, sana.FAMILY, TextOptions(max_length=300))
    assert counter.groups(["a", LONG]) == [16, 304] and counter.unconditional() == 16
    assert latent_facts(model, sana.FAMILY) == {"scaling_factor": "0.41407", "shift_factor": "0"}


def test_the_shift_of_the_published_solver_is_used(tmp_path):
    """diffusers' flow scheduler takes 1 from such a config, without a word."""
    solver = tiny_pipelines.save("sana", tmp_path / "solver", solver=True)
    euler = tiny_pipelines.save("sana", tmp_path / "euler")
    levels = noise_schedule(solver, "flow")
    sigmas = torch.arange(1, 1001) / 1000
    assert torch.allclose(levels, 3 * sigmas / (1 + 2 * sigmas))
    assert torch.equal(levels, noise_schedule(euler, "flow"))
    change_json(solver / "scheduler" / "scheduler_config.json", shift=1.0)
    assert torch.allclose(noise_schedule(solver, "flow"), sigmas), "its own name comes first"


@pytest.mark.parametrize(("targets", "count"), [("attention", 2 * 8), ("all-linear", 2 * 10)])
def test_the_layers_that_get_an_adapter(tmp_path, targets, count):
    from prep.models.families.sana import FAMILY

    model = tiny_pipelines.save("sana", tmp_path / "model")
    config = parse({"precision": "fp32", "lora": {"targets": targets, "rank": 2}}, "")
    names = targeted(layers_of(read_weights(model, FAMILY)), config.lora, LORA.presets)
    assert len(names) == count and not [name for name in names if "conv_depth" in name]
    trained = load(model, config, "flow", torch.device("cpu")).parameters
    assert len(trained) == 2 * count


def test_a_convolution_channel_by_channel_gets_no_lora(tmp_path):
    from prep.models.families.sana import FAMILY

    weights = read_weights(tiny_pipelines.save("sana", tmp_path / "model"), FAMILY)
    with pytest.raises(ConfigError) as caught:
        trained_shapes(weights, parse({"lora": {"targets": ["conv_depth"]}}, ""), LORA.presets)
    assert caught.value.message == (
        "lora.targets is ('conv_depth',), which chooses 'transformer_blocks.0.ff.conv_depth', but that convolves each "
        "channel by itself, which a LoRA cannot change")
    assert caught.value.hint == "list other layers in lora.targets"
