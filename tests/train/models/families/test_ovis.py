"""Ovis-Image's transformer is given numbered text tokens, in float32 whatever the precision."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from train.models.families.ovis import _numbers, predict
from train.models.family import Conditions


def test_text_tokens_are_numbered_as_by_the_pipeline():
    pipeline = tiny_pipelines.build("ovis")
    hidden, _, wanted, _ = tiny_pipelines.encode_prompts(pipeline, ["a cat"])
    assert torch.equal(_numbers(hidden.bfloat16()), wanted) and wanted[200].tolist() == [0, 200, 200]


def test_the_numbers_make_a_difference():
    transformer = tiny_pipelines.build("ovis").transformer
    text, noised = torch.randn(1, 8, 32), torch.randn(1, 16, 8, 8)
    found = []
    for hidden in (text, text.flip(1)):
        with torch.no_grad():
            found.append(predict(transformer, noised, torch.tensor([0.5]),
                                 Conditions(text={"hidden": hidden}, sizes_B6=torch.zeros(1, 6))))
    assert found[0].shape == (1, 16, 8, 8) and not torch.allclose(found[0], found[1], atol=1e-4)
