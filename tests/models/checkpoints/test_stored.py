"""Weights of 8 bits are what their scales say, however these are spelled and wherever they lie."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import fp8_weights
import pytest
import torch
from model_files import change_json
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prep.errors import ModelError
from prep.models.checkpoints import stored
from prep.models.checkpoints.stored import Stored
from prep.models.families.registry import FAMILIES
from prep.models.fingerprint import text_files
from prep.models.text.pipeline import load_encoder
from prep.models.vae import load_vae
from prep.models.weights import read_tensors

ATTENTION = "encoder.mid_block.attentions.0.to_q.weight"


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.mark.parametrize("scale_of", [fp8_weights.by_tensor, fp8_weights.by_row, fp8_weights.by_block,
                                      lambda weight: fp8_weights.by_row(weight).flatten(),
                                      lambda weight: fp8_weights.by_tensor(weight).reshape(1)])
@pytest.mark.parametrize("name", ["scale_weight", "weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_is_its_numbers_times_their_scale(tmp_path, name, scale_of, dtype):
    weight = torch.randn(200, 300) * torch.logspace(-3, 1, 200)[:, None]
    scale = scale_of(weight)
    path = tmp_path / "w.safetensors"
    numbers = (weight / fp8_weights.spread(scale.reshape(-1, 1) if scale.shape == (200,) else scale, weight.shape)
               ).to(torch.float8_e4m3fn)
    save_file({"x.weight": numbers, f"x.{name}": scale, "x.bias": torch.ones(3, dtype=torch.float16)}, path)
    found = Stored.of(read_tensors([path]))
    read = found.read("x.weight", dtype)
    assert read.dtype == dtype and found.read("x.bias").dtype == torch.float16
    assert ((read.float() - weight).abs() <= 0.07 * weight.abs() + 1e-4 * weight.abs().max()).all()


@pytest.mark.parametrize(("weight", "scale", "said"), [
    (torch.zeros(4, 6).to(torch.float8_e4m3fn), torch.ones(3), "of shape [3], expected one for [4, 6]"),
    (torch.zeros(4, 6).to(torch.float8_e4m3fn), torch.ones(2, 6), "of shape [2, 6], expected one for [4, 6]"),
    (torch.zeros(4, 6, dtype=torch.uint8), torch.ones(1),
     "x.weight as U8, expected floats: weights with scales are read as fp8 only"),
    (torch.zeros(4, 6).to(torch.float8_e4m3fn), torch.ones(4, dtype=torch.uint8), "x.weight_scale as U8, expected"),
])
def test_scales_of_another_format_are_refused(tmp_path, weight, scale, said):
    path = tmp_path / "w.safetensors"
    save_file({"x.weight": weight, "x.weight_scale": scale}, path)
    with pytest.raises(ModelError) as error:
        Stored.of(read_tensors([path])).read("x.weight")
    assert said in error.value.message and error.value.hint.startswith("name weights in bfloat16")


def test_a_scale_in_another_file_than_its_weight(model):
    vae = model / "vae"
    meant = {}
    fp8_weights.rewrite(vae, lambda weights: meant.update(fp8_weights.scaled(weights)[1]) or
                        fp8_weights.scaled(weights)[0])
    fp8_weights.split(vae)
    change_json(vae / "config.json", quantization_config={"quant_method": "fp8"})
    loaded = load_vae(model, torch.float32).state_dict()
    assert ATTENTION in loaded and all(torch.equal(value, meant[key]) for key, value in loaded.items())


def test_scaled_weights_are_given_to_the_library_without_a_copy_on_disk(model, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fp8_weights.rewrite(model / "text_encoder", lambda weights: fp8_weights.scaled(weights)[0])
    monkeypatch.setattr(stored, "write", full)
    monkeypatch.setattr("prep.models.checkpoints.staging.link_or_copy", full)
    load_encoder(model, FAMILIES["sd15"], "text_encoder", text_files(model), torch.float32)


def test_what_is_written_is_read_by_the_library(tmp_path):
    made = {"b": torch.arange(6).reshape(2, 3), "a": torch.rand(3, 5).to(torch.float8_e5m2), "none": torch.zeros(0, 4),
            "half": torch.rand(5).bfloat16(), "one": torch.tensor(2.0)}
    path = tmp_path / "w.safetensors"
    stored.write(path, {name: (value.dtype, tuple(value.shape)) for name, value in made.items()}, iter(made.values()))
    found = load_file(path)
    assert found.keys() == made.keys()
    assert all(torch.equal(found[name].float(), value.float()) and found[name].dtype == value.dtype
               for name, value in made.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    read = Stored.of(read_tensors([path]))
    assert all(torch.equal(read.read(name).float(), value.float()) for name, value in made.items())


HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_a_cast_rounds_each_number_as_torch_does(tmp_path, kind, dtype):
    every = torch.cat([torch.arange(1 << 16).to(torch.uint16).view(half).double() for half in HALVES])
    path, numbers = tmp_path / "w.safetensors", torch.cat([every, every * (1 + 2**-9), torch.ones(3)]).to(kind)
    save_file({"x": numbers}, path)
    found, wanted = Stored.of(read_tensors([path])).cast("x", dtype), numbers.to(dtype)
    assert found.dtype == dtype and torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~found.isnan()], wanted[~wanted.isnan()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_file_that_lost_its_end_after_its_header_was_read(tmp_path, dtype):
    path = tmp_path / "w.safetensors"
    save_file({"x": torch.ones(40)}, path)
    found = Stored.of(read_tensors([path]))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match="changed while it was read"):
        found.cast("x", dtype)


def test_a_dtype_that_torch_does_not_have(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"x": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"', 1))
    with pytest.raises(ModelError) as error:
        Stored.of(read_tensors([path])).read("x")
    assert error.value.message.startswith(f"{path} has a tensor of 12 bytes for [3] F99, expected one of: F64, F32, ")
