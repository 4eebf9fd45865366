"""PixArt's text rows: without padding, of lower-cased captions that are not cleaned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.pixart import ALPHA, SIGMA
from prep.models.family import TextOptions
from prep.models.text.lengths import LengthCounter

CPU = torch.device("cpu")
LONG = "a caption (with brackets) of many words " * 10


@pytest.fixture(scope="module")
def alpha() -> object:
    return tiny_pipelines.build("pixart_alpha")


def rows(pipeline, captions, most=120):
    with torch.no_grad():
        return [row["hidden"] for row in ALPHA.text.encode(pipeline, captions, TextOptions(max_length=most), CPU)]


def test_rows_have_a_caption_s_tokens_and_no_padding(alpha):
    short, long = rows(alpha, ["a cat", LONG])
    assert short.shape == (len(alpha.tokenizer("a cat")["input_ids"]), 32)
    assert long.shape == (120, 32)


def test_captions_are_lower_cased_and_keep_their_signs(alpha):
    one, two, three = rows(alpha, ["  A (red) CAT\n", "a (red) cat", "a red cat"])
    assert torch.allclose(one, two, atol=1e-6)
    assert len(three) < len(two)


@pytest.mark.parametrize(("family", "most"), [(ALPHA, 120), (SIGMA, 300)], ids=["alpha", "sigma"])
def test_lengths_are_counted(family, most, tmp_path: Path):
    model = tiny_pipelines.save(family.name, tmp_path / "model")
    options = TextOptions(max_length=family.text.max_length)
    assert dict(family.text.shapes(Configs(model), options)) == {"hidden": (most, 32)}
    counter = LengthCounter(model, family, options)
    tokens = len(tiny_pipelines.build(family.name).tokenizer("a cat in the rain")["input_ids"])
    assert counter.groups(["a", "a cat in the rain", LONG]) == [16, -(-tokens // 16) * 16, -(-most // 16) * 16]
    assert counter.unconditional() == 16
