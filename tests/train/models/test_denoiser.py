"""Loading the denoiser."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from model_files import change_json
from safetensors.torch import load_file, save_file

from prep.errors import ModelError
from train.config.load import parse
from train.models.denoiser import load, noise_schedule


def test_weights_that_lack_tensors_are_refused(tiny_model, tmp_path):
    """diffusers would leave them at random values, and say so only in a log."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / "unet" / "diffusion_pytorch_model.safetensors"
    values = load_file(path)
    for name in ("conv_in.bias", "conv_out.bias"):
        del values[name]
    path.unlink()
    save_file(values, path, metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load(model, parse({"precision": "fp32"}, "test"), "epsilon", torch.device("cpu"))
    assert caught.value.message == f"the weights in {model / 'unet'} lack conv_in.bias, conv_out.bias"
    assert "download both again" in caught.value.hint


@pytest.mark.parametrize(("name", "text", "message"), [
    ("unet/diffusion_pytorch_model.safetensors", "{}", "has no safetensors header"),
    ("unet/config.json", "[" * 100_000, "is nested too deeply"),
])
def test_a_denoiser_that_is_damaged(tiny_model, tmp_path, name, text, message):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        load(model, parse({"precision": "fp32"}, "test"), "epsilon", torch.device("cpu"))


@pytest.mark.parametrize("named", [["mod", "Evil"], ["diffusers", "UNet2DModel"], None])
def test_a_denoiser_of_another_class(tiny_model, tmp_path, named):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    change_json(model / "model_index.json", unet=named)
    with pytest.raises(ModelError, match=r"unet in .*model_index\.json is .*, expected UNet2DConditionModel of"):
        load(model, parse({"precision": "fp32"}, "test"), "epsilon", torch.device("cpu"))


@pytest.mark.parametrize("changes", [{"shift": -3.0}, {"shift": float("nan")}])
def test_sigmas_that_are_none(tiny_model, tmp_path, changes):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    change_json(model / "scheduler" / "scheduler_config.json", **changes)
    with pytest.raises(ModelError, match=r"the scheduler's config in .* gives sigmas outside of 0 to 1"):
        noise_schedule(model, "flow")


def test_a_schedule_is_rescaled_as_in_the_paper(tiny_model, tmp_path):
    """Lin et al. 2024, algorithm 1: roots of cumulative alphas, moved to end in 0 and scaled to begin as before."""
    plain = noise_schedule(tiny_model, "v_prediction").double().numpy()
    roots = np.sqrt(plain)
    wanted = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    found = noise_schedule(tiny_model, "v_prediction", zero_terminal_snr=True)
    assert np.allclose(found.numpy(), wanted, atol=2e-6) and float(found[-1]) == 0 and plain[-1] > 1e-3
    model = shutil.copytree(tiny_model, tmp_path / "model")
    change_json(model / "scheduler" / "scheduler_config.json", rescale_betas_zero_snr=True)
    assert torch.equal(noise_schedule(model, "v_prediction"), found), "a model whose own schedule is so"


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_train_timesteps": 10**12}, "has num_train_timesteps 1000000000000, expected a whole number from 1 to"),
    ({"num_train_timesteps": "x"}, "has num_train_timesteps 'x', expected a whole number"),
    ({"beta_schedule": ["x"]}, "cannot use the scheduler's config in "),
    ({"beta_end": float("nan")}, "gives alphas outside of 0 to 1"),
    ({"trained_betas": [2.0, 3.0]}, "gives alphas outside of 0 to 1"),
])
def test_schedules_that_are_none(tiny_model, tmp_path, changes, message):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    change_json(model / "scheduler" / "scheduler_config.json", **changes)
    with pytest.raises(ModelError, match=message) as error:
        noise_schedule(model, "epsilon")
    assert error.value.hint.startswith("download the model again")
