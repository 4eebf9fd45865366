"""Lumina 2's transformer counts time from noise to picture, and has positions for sides of some length."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.families.lumina2 import longest_side
from train.config.load import parse
from train.models.denoiser import load, predict
from train.models.family import Conditions

CPU = torch.device("cpu")


def test_time_and_prediction_are_reversed(tmp_path):
    model = tiny_pipelines.save("lumina2", tmp_path / "model")
    denoiser = load(model, parse({"precision": "fp32"}, ""), "flow", CPU, adapt=False)
    text = {"hidden": torch.randn(2, 16, 32), "attention_mask": torch.ones(2, 16, dtype=torch.uint8)}
    noised, time = torch.randn(2, 16, 8, 8), torch.tensor([0, 999])
    with torch.no_grad():
        found = predict(denoiser, noised, time, Conditions(text=text, sizes_B6=torch.zeros(2, 6)))
        usual = denoiser.model(noised, 1 - denoiser.levels[time], text["hidden"], text["attention_mask"]).sample
    assert torch.allclose(found, -usual, atol=1e-6)
    assert denoiser.levels[999] == 1 and denoiser.levels[0] < 0.01


@pytest.mark.parametrize(("config", "longest"), [
    ({}, 8192), ({"axes_lens": [300, 512, 256]}, 4096), ({"axes_lens": None}, None), ({"axes_lens": ["a", "b"]}, None),
])
def test_the_longest_side_has_a_position_for_each_patch(config, longest):
    assert longest_side(config) == longest


def test_a_side_is_as_long_as_its_positions_allow(tmp_path):
    """The tiny model has 64 positions a side."""
    transformer = tiny_pipelines.build("lumina2").transformer
    mask = torch.ones(1, 4, dtype=torch.uint8)
    text = {"encoder_hidden_states": torch.randn(1, 4, 32), "encoder_attention_mask": mask}
    assert longest_side(transformer.config) == 64 * 16
    with torch.no_grad():
        assert transformer(torch.randn(1, 16, 128, 2), torch.tensor([0.5]), **text).sample.shape == (1, 16, 128, 2)
        with pytest.raises(RuntimeError):
            transformer(torch.randn(1, 16, 130, 2), torch.tensor([0.5]), **text)
