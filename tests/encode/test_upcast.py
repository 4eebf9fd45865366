"""SDXL's VAE overflows in float16: it computes in float32, as in diffusers, and the keys say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from pictures import draw
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from row_values import read_row

from prep.cache.reader import Reader
from prep.cache.store import Cache
from prep.loader.index import open_index
from prep.manifest.document import read_manifest
from prep.models.vae import VaeEncoder

CPU = torch.device("cpu")
FACTOR = 3e5  # of the first layer: its weights fit into float16, and what they make of a picture does not


@pytest.fixture
def model(tmp_path) -> Path:
    """SDXL with a VAE whose activations overflow in float16."""
    folder = tiny_pipelines.save("sdxl", tmp_path / "model")
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["encoder.conv_in.weight"] *= FACTOR
    assert tensors["encoder.conv_in.weight"].half().isfinite().all()
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


@pytest.fixture
def dtypes(monkeypatch) -> list[torch.dtype]:
    """The dtypes that the VAE was asked to compute in."""
    forward, seen = VaeEncoder._forward, []

    def watched(self: VaeEncoder, pixels: Any, dtype: torch.dtype) -> Any:
        seen.append(dtype)
        return forward(self, pixels, dtype)

    monkeypatch.setattr(VaeEncoder, "_forward", watched)
    return seen


@pytest.fixture
def encode(prep, tmp_path, model):
    draw(tmp_path / "photos" / "0.png", (64, 64), seed=0).with_suffix(".txt").write_text("a cat")

    def go(compute: str) -> tuple[Any, np.ndarray]:
        """The manifest and its latent."""
        done = prep("encode", tmp_path / "photos", "--model", model, "--cache", tmp_path / "cache", "-o",
                    tmp_path / f"{compute}.json", "--resolution", 64, "--step", 32, "--dtype", "float16", "--compute",
                    compute, "--device", "cpu", "--json")
        assert done.code == 0, done.err
        manifest = read_manifest(tmp_path / f"{compute}.json")
        index = open_index(manifest)
        place = index.ref(*(int(index.samples.views[name][0]) for name in ("latent_shard", "latent_row")))
        return manifest, read_row(Reader(Cache(root=tmp_path / "cache")), place.shard, "latent", place.row)

    return go


def contexts(manifest: Any) -> dict[str, Any]:
    return {name: field["context"]["compute"] for name, field in manifest.document["fields"].items()}


def test_latents_are_those_of_float32_and_their_keys_too(encode, dtypes):
    manifest, latent = encode("float16")
    assert contexts(manifest) == {"latent": "float32", "text": "float16"}
    assert set(dtypes) == {torch.float32} and np.isfinite(latent).all()
    usual, same = encode("float32")
    assert contexts(usual) == {"latent": "float32", "text": "float32"}
    assert usual.fields["latent"].context == manifest.fields["latent"].context and np.array_equal(latent, same)


def test_a_vae_made_for_float16_computes_in_it(encode, model, dtypes):
    """This one is not: its rows are computed again, in float32."""
    config = json.loads((model / "vae" / "config.json").read_text())
    (model / "vae" / "config.json").write_text(json.dumps({**config, "force_upcast": False}))
    manifest, latent = encode("float16")
    assert contexts(manifest) == {"latent": "float16", "text": "float16"}
    assert dtypes[0] == torch.float16 and dtypes.count(torch.float32) == dtypes.count(torch.float16)
    assert np.isfinite(latent).all()


def test_diffusers_computes_the_same_in_a_pipeline_of_float16(encode, model, tmp_path):
    _, latent = encode("float16")
    pipeline = diffusers.StableDiffusionXLImg2ImgPipeline(**tiny_pipelines.load(model).components)
    pipeline.vae.half()
    seen: list[Any] = []
    forward = pipeline.vae.encode
    pipeline.vae.encode = lambda image: seen.append((image.dtype, forward(image))) or seen[-1][1]
    with Image.open(tmp_path / "photos" / "0.png") as picture:
        image = pipeline.image_processor.preprocess(picture.convert("RGB")).half()
    with torch.no_grad(), tiny_pipelines.known_warnings():
        pipeline.prepare_latents(image, None, 1, 1, torch.float16, CPU, torch.Generator(), add_noise=False)
    ((dtype, made),) = seen
    assert dtype == torch.float32
    assert np.allclose(latent, made.latent_dist.mean[0].numpy(), rtol=1e-2, atol=1e-2)
