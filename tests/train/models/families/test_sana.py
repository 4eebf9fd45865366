"""How SANA's transformer is called, and its schedule read, whichever of two schedulers the model names."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from model_files import change_json

from prep.errors import ConfigError
from train.config.load import parse
from train.models.denoiser import load, noise_schedule
from train.models.families.sana import DENOISER
from train.models.targets import layers_of, read_weights, targeted, trained_shapes


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
    names = targeted(layers_of(read_weights(model, FAMILY)), config.lora, DENOISER.presets)
    assert len(names) == count and not [name for name in names if "conv_depth" in name]
    trained = load(model, config, "flow", torch.device("cpu")).parameters
    assert len(trained) == 2 * count


def test_a_convolution_channel_by_channel_gets_no_lora(tmp_path):
    from prep.models.families.sana import FAMILY

    weights = read_weights(tiny_pipelines.save("sana", tmp_path / "model"), FAMILY)
    with pytest.raises(ConfigError) as caught:
        trained_shapes(weights, parse({"lora": {"targets": ["conv_depth"]}}, ""), DENOISER.presets)
    assert caught.value.message == (
        "lora.targets is ('conv_depth',), which chooses 'transformer_blocks.0.ff.conv_depth', but that convolves each "
        "channel by itself, which a LoRA cannot change")
    assert caught.value.hint == "list other layers in lora.targets"
