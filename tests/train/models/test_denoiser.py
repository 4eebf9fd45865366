"""Loading the denoiser."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from prep.errors import ModelError
from train.config.load import parse
from train.models.denoiser import load


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
    assert "fetch both again" in caught.value.hint
