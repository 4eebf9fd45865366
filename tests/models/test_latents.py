"""What a VAE's config and weights say of its latents, and how VAEs of video take pictures."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_files import write_json, write_safetensors

from prep.errors import ModelError
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.latents import latent_facts, vae_compute
from prep.models.vae import decode, posterior
from prep.models.weights import read_vector

FOUR = list(range(4))


def family(kind: str, channels: int) -> Family:
    """A family whose VAE is of this class."""
    usual = FAMILIES["sd15"]
    return replace(usual, latent_channels=channels, components={**usual.components, "vae": (("diffusers", kind),)})


def model(root: Path, kind: str, **config: Any) -> Path:
    write_json(root / "model_index.json", {"_class_name": "SomePipeline", "vae": ["diffusers", kind]})
    write_json(root / "vae" / "config.json", {"_class_name": kind, **config})
    return root


@pytest.fixture
def of(monkeypatch):
    """A family with such a VAE, known to the registry."""
    def known(kind: str, channels: int) -> Family:
        made = family(kind, channels)
        monkeypatch.setitem(FAMILIES, "made", made)
        return made

    return known


QWEN = {"z_dim": 4, "dim_mult": [1, 2, 4, 4], "latents_mean": [0.5, -1, 0, 0.1], "latents_std": [1.5, 2.0, 1, 1]}


def test_statistics_of_channels(of, tmp_path):
    wanted = of("AutoencoderKLQwenImage", 4)
    found = latent_facts(model(tmp_path, "AutoencoderKLQwenImage", scaling_factor=0.5, **QWEN), wanted)
    assert found == {"scaling_factor": "1", "shift_factor": "0", "mean": ["0.5", "-1", "0", "0.1"],
                     "std": ["1.5", "2", "1", "1"]}


@pytest.mark.parametrize("mean", [None, [1, 2, 3], [1, 2, 3, float("nan")], [1, 2, 3, 1e9], [True] * 4, "1234", {}])
def test_statistics_that_are_none(of, tmp_path, mean):
    wanted = of("AutoencoderKLQwenImage", 4)
    with pytest.raises(ModelError, match=r"config.json has latents_mean .*, expected 4 numbers from -10000 to 10000"):
        latent_facts(model(tmp_path, "AutoencoderKLQwenImage", **{**QWEN, "latents_mean": mean}), wanted)


def test_a_standard_deviation_of_zero(of, tmp_path):
    wanted = of("AutoencoderKLQwenImage", 4)
    with pytest.raises(ModelError, match=r"latents_std \[1.5, 0, 1, 1\], expected 4 numbers from 0.0001 to 10000"):
        latent_facts(model(tmp_path, "AutoencoderKLQwenImage", **{**QWEN, "latents_std": [1.5, 0, 1, 1]}), wanted)


def test_the_factor_of_a_vae_of_video(of, tmp_path):
    wanted = of("AutoencoderKLQwenImage", 4)
    with pytest.raises(ModelError, match=r"have 4 pixels a side, expected 8"):
        latent_facts(model(tmp_path, "AutoencoderKLQwenImage", **{**QWEN, "dim_mult": [1, 2, 4]}), wanted)


FLUX2 = {"latent_channels": 1, "block_out_channels": [8] * 4, "batch_norm_eps": 1e-4, "patch_size": [2, 2]}


def weights(root: Path, shape: int = 4) -> None:
    write_safetensors(root / "vae" / "diffusion_pytorch_model.safetensors",
                      {"encoder.x": [8], "bn.running_mean": [shape], "bn.running_var": [shape]})


def test_statistics_of_a_batch_norm(of, tmp_path):
    """Tensors of `write_safetensors` count up from 0."""
    wanted = of("AutoencoderKLFlux2", 1)
    weights(model(tmp_path, "AutoencoderKLFlux2", **FLUX2))
    found = latent_facts(tmp_path, wanted)
    assert found["scaling_factor"] == "1" and found["shift_factor"] == "0" and found["mean"] == ["0", "1", "2", "3"]
    assert [float(value) for value in found["std"]] == [math.sqrt(value + 1e-4) for value in FOUR]


@pytest.mark.parametrize(("changes", "said"), [
    ({"patch_size": [1, 2]}, r"has patch_size \[1, 2\], expected \[2, 2\]"),
    ({"batch_norm_eps": 0}, r"has batch_norm_eps 0, expected a number above 0, at most 1"),
    ({"batch_norm_eps": "1"}, r"has batch_norm_eps '1', expected a number above 0, at most 1"),
])
def test_a_batch_norm_that_is_not_as_expected(of, tmp_path, changes, said):
    wanted = of("AutoencoderKLFlux2", 1)
    weights(model(tmp_path, "AutoencoderKLFlux2", **{**FLUX2, **changes}))
    with pytest.raises(ModelError, match=said):
        latent_facts(tmp_path, wanted)


def test_a_batch_norm_of_other_channels(of, tmp_path):
    wanted = of("AutoencoderKLFlux2", 1)
    weights(model(tmp_path, "AutoencoderKLFlux2", **FLUX2), shape=8)
    with pytest.raises(ModelError, match=r"vae has bn.running_mean .*, expected 4 numbers from -10000 to 10000"):
        latent_facts(tmp_path, wanted)


# ---- numbers from weights --------------------------------------------------------------------------------------------


def vector(path: Path, dtype: str, shape: list[int], data: bytes) -> Path:
    header = json.dumps({"v": {"dtype": dtype, "shape": shape, "data_offsets": [2, 2 + len(data)]},
                         "first": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1\2" + data)
    return path


@pytest.mark.parametrize(("dtype", "kind"), [("F64", torch.float64), ("F32", torch.float32), ("F16", torch.float16),
                                             ("BF16", torch.bfloat16)])
def test_a_vector_of_any_float_dtype(tmp_path, dtype, kind):
    values = torch.tensor([0.1, -2.5, 3e-3, 0.0], dtype=kind)
    raw = values.view(torch.uint8).numpy().tobytes()
    found = read_vector([vector(tmp_path / "w", dtype, [4], raw)], "v")
    assert found == tuple(values.double().tolist())


@pytest.mark.parametrize(("dtype", "shape", "size"), [("I32", [4], 16), ("F32", [2, 2], 16),
                                                      ("F32", [1 << 17], 1 << 19)])
def test_a_tensor_that_is_no_vector_of_floats(tmp_path, dtype, shape, size):
    path = vector(tmp_path / "w", dtype, shape, bytes(size))
    with pytest.raises(ModelError, match=r"has v .*, expected one dimension of floats"):
        read_vector([path], "v")


def test_a_vector_whose_bytes_do_not_fit_its_shape(tmp_path):
    path = vector(tmp_path / "w", "F32", [4], bytes(12))
    with pytest.raises(ModelError, match=r"has v of 12 bytes, expected 4 numbers"):
        read_vector([path], "v")


def test_a_vector_that_is_missing(tmp_path):
    path = vector(tmp_path / "w", "F32", [1], bytes(4))
    with pytest.raises(ModelError, match=r"the weights in .* have no tensor bn.running_mean"):
        read_vector([path], "bn.running_mean")


@pytest.mark.parametrize(("config", "said"), [
    ({}, None), ({"encoder_block_out_channels": [8, 8, 8]}, "have 4 pixels a side, expected 32"),
    ({"latent_channels": 16}, "have 16 channels, expected 32"),
])
def test_the_factor_of_an_autoencoder_of_deep_compression(of, tmp_path, config, said):
    wanted = replace(of("AutoencoderDC", 32), factor=32)
    directory = model(tmp_path, "AutoencoderDC", scaling_factor=0.5, **config)
    if said is None:
        assert latent_facts(directory, wanted) == {"scaling_factor": "0.5", "shift_factor": "0"}
        return
    with pytest.raises(ModelError, match=said):
        latent_facts(directory, wanted)


# ---- calls -----------------------------------------------------------------------------------------------------------


class AutoencoderKLQwenImage:
    """Wants a time axis; its latents are the clip's, halved in value."""

    config = SimpleNamespace(in_channels=3)

    def encode(self, clip_B3THW: torch.Tensor) -> Any:
        assert clip_B3THW.shape[2] == 1
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=clip_B3THW / 2, std=clip_B3THW / 4))

    def decode(self, clip_BCThw: torch.Tensor) -> Any:
        assert clip_BCThw.shape[2] == 1
        return SimpleNamespace(sample=clip_BCThw * 2)


def test_a_vae_of_video_is_given_clips_of_one_frame():
    picture = torch.rand(2, 3, 4, 6)
    mean, std = posterior(AutoencoderKLQwenImage(), picture)
    assert torch.equal(std, picture / 4)
    assert torch.equal(mean, picture / 2) and torch.equal(decode(AutoencoderKLQwenImage(), mean), picture)


@pytest.mark.parametrize(("name", "config", "asked", "wanted"), [
    ("sdxl", {"force_upcast": True}, "float16", "float32"), ("sdxl", {}, "float16", "float32"),
    ("sdxl", {"force_upcast": False}, "float16", "float16"), ("sdxl", {"force_upcast": True}, "bfloat16", "bfloat16"),
    ("sdxl", {"force_upcast": True}, "float32", "float32"), ("sd15", {"force_upcast": True}, "float16", "float16"),
    ("flux", {"force_upcast": True}, "float16", "float16"),
])
def test_a_vae_computes_in_what_its_pipeline_does(tmp_path, name, config, asked, wanted):
    write_json(tmp_path / "vae" / "config.json", config)
    assert vae_compute(tmp_path, FAMILIES[name], asked) == wanted


class AutoencoderDC:
    """Has no posterior; its latent is the picture, halved in value."""

    def encode(self, image_B3HW: torch.Tensor) -> Any:
        return SimpleNamespace(latent=image_B3HW / 2)


def test_an_autoencoder_without_a_posterior_has_one_latent():
    picture = torch.rand(2, 3, 4, 6)
    latent, deviation = posterior(AutoencoderDC(), picture)
    assert torch.equal(latent, picture / 2) and not deviation.any() and deviation.shape == latent.shape
