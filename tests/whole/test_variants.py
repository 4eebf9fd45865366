"""Model directories with weights of a variant, as `save_pretrained(variant="fp16")` of the libraries writes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel

CLASSES = {"unet": UNet2DConditionModel, "vae": AutoencoderKL, "text_encoder": CLIPTextModel}
SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu")


def variant_of(model: Path, made: Path, dtype: torch.dtype = torch.float32, **options: object) -> Path:
    """A copy of `model` whose weights are all saved as the variant fp16, as `dtype`."""
    shutil.copytree(model, made)
    for name, kind in CLASSES.items():
        shutil.rmtree(made / name)
        if kind is CLIPTextModel:
            loaded = kind.from_pretrained(model / name, dtype=dtype)
        else:
            loaded = kind.from_pretrained(model / name, torch_dtype=dtype, low_cpu_mem_usage=False)
        loaded.save_pretrained(made / name, variant="fp16", safe_serialization=True, **options)
    assert not list(made.glob("*/model.safetensors")) and not list(made.glob("*/*_model.safetensors"))
    return made


@pytest.fixture
def encode(prep, photos, tmp_path):
    """`encode(model)` encodes the photos with it into one cache; the report."""
    def go(model):
        result = prep("encode", photos, "--model", model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                      *SMALL, "--json")
        assert result.code == 0, result.err
        return result.json

    return go


def test_a_variant_with_the_same_weights_needs_no_encoding(encode, tiny_model, tmp_path):
    assert encode(tiny_model)["encoded"]["latent"] == 8
    report = encode(variant_of(tiny_model, tmp_path / "same"))
    assert report["encoded"] == {"latent": 0, "mask": 0, "text": 0}, "the files' names decide nothing"


@pytest.mark.few("several")
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["one file", "several"])
def test_half_precision_makes_other_rows_and_can_be_trained(encode, train, tiny_model, tmp_path, options):
    usual = encode(tiny_model)["encoded"]
    half = variant_of(tiny_model, tmp_path / "half", torch.float16, **options)
    assert bool(list(half.glob("*/*.safetensors.index.fp16.json"))) == bool(options)
    report = encode(half)
    assert (report["encoded"]["latent"], report["encoded"]["text"]) == (usual["latent"], usual["text"])
    result = train("run", tmp_path / "m.json", "--batch-size", 2, "--steps", 2, "--device", "cpu", "--precision",
                   "fp32", "-o", tmp_path / "run", "--set", "sample.every=0")
    assert result.code == 0, result.err
    assert (tmp_path / "run" / "lora.safetensors").is_file()
