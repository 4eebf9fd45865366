"""Chroma's text rows: a caption's tokens and one of padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.chroma import FAMILY
from prep.models.family import TextOptions
from prep.models.text.lengths import LengthCounter

CPU = torch.device("cpu")
LONG = "a caption of many words " * 30


@pytest.fixture(scope="module")
def pipeline() -> object:
    return tiny_pipelines.build("chroma")


def rows(pipeline, captions, most=512):
    with torch.no_grad():
        return [row["hidden"] for row in FAMILY.text.encode(pipeline, captions, TextOptions(max_length=most), CPU)]


@pytest.mark.parametrize("most", [64, 512])
def test_a_row_has_the_caption_s_tokens_and_one_of_padding(pipeline, most):
    hidden, _, _, *_ = tiny_pipelines.encode_prompts(pipeline, ["a cat"], max_sequence_length=most)
    tokens = len(pipeline.tokenizer("a cat")["input_ids"])
    short, long = rows(pipeline, ["a cat", LONG], most)
    assert torch.allclose(short, hidden[0, :tokens + 1], atol=1e-6)
    assert long.shape == (most, 32), "a caption that fills the row leaves no place for padding"


def test_rows_do_not_depend_on_the_longest_row(pipeline):
    assert torch.allclose(rows(pipeline, ["a cat"], 64)[0], rows(pipeline, ["a cat", LONG])[0], atol=1e-6)


def test_the_row_without_a_prompt_is_the_encoding_of_nothing(pipeline):
    end_and_padding = 2
    row = FAMILY.text.unconditional(pipeline, TextOptions(max_length=512), CPU)["hidden"]
    assert row.shape == (end_and_padding, 32)
    assert torch.equal(row, rows(pipeline, [""])[0])


def test_lengths_are_counted(pipeline, tmp_path: Path):
    model, options = tiny_pipelines.save("chroma", tmp_path / "model"), TextOptions(max_length=512)
    assert dict(FAMILY.text.shapes(Configs(model), options)) == {"hidden": (512, 32)}
    counter = LengthCounter(model, FAMILY, options)
    sixteen = "a" * (16 - len(pipeline.tokenizer("")["input_ids"]) - 1)  # one more for T5's mark of a word's start
    assert len(pipeline.tokenizer(sixteen)["input_ids"]) == 16
    assert counter.groups(["a", sixteen[1:], sixteen, LONG]) == [16, 16, 32, 512]
    assert counter.unconditional() == 16
