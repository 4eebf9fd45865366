"""CogView4's text rows: padded on the left to a multiple of 16 tokens, whatever is encoded beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.cogview4 import FAMILY
from prep.models.family import TextOptions
from prep.models.text.lengths import LengthCounter

CPU, OPTIONS = torch.device("cpu"), TextOptions(max_length=1024)
START = 2  # tokens that start every text
CAPTIONS = ["a cat", "two dogs on a long green bench", "a word, " * 200]


@pytest.fixture(scope="module")
def pipeline() -> object:
    return tiny_pipelines.build("cogview4")


def rows(pipeline, captions, options=OPTIONS):
    with torch.no_grad():
        return [row["hidden"] for row in FAMILY.text.encode(pipeline, captions, options, CPU)]


def test_a_row_is_the_pipeline_s_for_that_caption_alone(pipeline):
    for caption, row in zip(CAPTIONS, rows(pipeline, CAPTIONS), strict=True):
        alone, _ = tiny_pipelines.encode_prompts(pipeline, [caption], max_sequence_length=1024)
        assert torch.equal(row, alone[0])
        assert len(row) == min(-(-(START + len(caption)) // 16) * 16, 1024)
    together, _ = tiny_pipelines.encode_prompts(pipeline, CAPTIONS[:2])
    assert together.shape[1] == 32 > len(rows(pipeline, CAPTIONS[:1])[0]) == 16, "the pipeline pads to the longest"


def test_padding_is_part_of_the_row(pipeline):
    row = rows(pipeline, ["a cat"])[0]
    assert row[:16 - START - len("a cat")].any(dim=1).all()


@pytest.mark.parametrize(("most", "tokens"), [(96, 96), (100, 112)])
def test_captions_are_cut_off_before_they_are_padded(pipeline, tmp_path: Path, most, tokens):
    model, options = tiny_pipelines.save("cogview4", tmp_path / "model"), TextOptions(max_length=most)
    assert dict(FAMILY.text.shapes(Configs(model), options)) == {"hidden": (tokens, 32)}
    assert rows(pipeline, [CAPTIONS[2]], options)[0].shape == (tokens, 32)
    counter = LengthCounter(model, FAMILY, options)
    assert counter.groups(CAPTIONS) == [16, 32, tokens] and counter.unconditional() == 16
