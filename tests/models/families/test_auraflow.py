"""AuraFlow's text rows: of one length, with zeros for padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.auraflow import FAMILY
from prep.models.family import TextOptions

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
