"""SANA's text rows: the pipeline's instruction before captions but not before negatives, and no padding."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.errors import ModelError
from prep.models.families import sana
from prep.models.family import TextOptions
from prep.models.latents import latent_facts
from prep.models.text.lengths import LengthCounter

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
        empty = sana.unconditional(pipeline, TextOptions(max_length=300), CPU)["hidden"]
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
