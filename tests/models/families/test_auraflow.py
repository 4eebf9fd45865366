"""AuraFlow's text rows: of one length, with zeros for padding.

What AuraFlow's transformer makes of padding and of sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.auraflow import FAMILY, longest_side, predict
from prep.models.family import Conditions, TextOptions

CPU = torch.device("cpu")


@pytest.mark.parametrize("most", [256, 20])
def test_padding_is_zeros_and_part_of_the_row(tmp_path: Path, most):
    model, options = tiny_pipelines.save("auraflow", tmp_path / "model"), TextOptions(max_length=most)
    pipeline = tiny_pipelines.load(model)
    with torch.no_grad():
        short, long = (row["hidden"] for row in FAMILY.text.encode(pipeline, ["a cat", "many words " * 40], options,
                                                                   CPU))
    tokens = len(pipeline.tokenizer("a cat")["input_ids"])
    assert short.shape == long.shape == FAMILY.text.shapes(Configs(model), options)["hidden"] == (most, 32)
    assert short[:tokens].any(dim=1).all() and not short[tokens:].any() and long.any(dim=1).all()


@pytest.fixture(scope="module")
def transformer() -> object:
    return tiny_pipelines.build("auraflow").transformer


def answer(transformer, hidden, cells=(4, 4)):
    noised = torch.randn(1, 4, *cells, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return predict(transformer, noised, torch.tensor([0.5]),
                                Conditions(text={"hidden": hidden}, sizes_B6=torch.zeros(1, 6)))


def test_rows_of_zeros_matter(transformer):
    """So rows cannot be stored without them."""
    hidden = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([hidden, torch.zeros(1, 248, 32)], dim=1)
    assert not torch.allclose(answer(transformer, hidden), answer(transformer, padded), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("config", "most"), [({"pos_embed_max_size": 256}, 256), ({"pos_embed_max_size": 9216}, 1536),
                                              ({}, 512), ({"pos_embed_max_size": "x"}, None)])
def test_the_longest_side_is_that_of_the_table_of_positions(config, most):
    assert longest_side(config) == most


def test_a_size_beyond_it_is_one_that_the_transformer_cannot_take(transformer):
    hidden = torch.zeros(1, 8, 32)
    most = longest_side(transformer.config) // 8
    assert answer(transformer, hidden, (most, 2)).shape == (1, 4, most, 2)
    with pytest.raises(IndexError):
        answer(transformer, hidden, (most + 4, 2))
