"""`prep encode` on a device with little memory: smaller batches, the same rows, and a clear error when one is too much.

The device is a model that raises what PyTorch raises, for batches above a size.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from row_values import read_row
from transformers import CLIPTextModel

from prep.cache.reader import Reader
from prep.cache.shard_header import read_keys
from prep.cache.store import Cache
from prep.models import vae as vaes
from prep.models.text import encoder as encoding
from prep.models.text.encoder import TextEncoder
from prep.models.vae import VaeEncoder


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    def go(cache, *options):
        return prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / cache, "-o",
                    tmp_path / f"{cache}.json", "--resolution", 128, "--upscale", "allow", "--buckets", "single",
                    "--dtype", "float32", "--device", "cpu", "--json", *options)

    return go


@pytest.fixture
def limit(monkeypatch):
    """`limit(kind, most)`: encoders of that kind hold `most` items at a time; the sizes that they are asked for."""

    def go(kind, most):
        forward, asked = kind._forward, []

        def limited(self, items, *args):
            asked.append(len(items))
            if len(items) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return forward(self, items, *args)

        monkeypatch.setattr(kind, "_forward", limited)
        return asked

    return go


def rows(root) -> dict[tuple[str, str], np.ndarray]:
    """Every row of a cache, by key and array."""
    cache = Cache(root=root)
    reader = Reader(cache)
    return {(bytes(key).hex(), folder.name): read_row(reader, shard, folder.name, number)
            for shard in cache.shards() for folder in cache.shard(shard).iterdir()
            if folder.is_dir() and folder.name != "key" for number, key in enumerate(read_keys(cache, shard))}


def test_latents_and_text_are_encoded_in_smaller_batches_with_the_same_keys_and_rows(encode, limit, tmp_path):
    assert encode("roomy", "--batch-size", 8).code == 0
    pictures, captions = limit(VaeEncoder, 3), limit(TextEncoder, 2)
    result = encode("small", "--batch-size", 8)
    assert result.code == 0 and result.json["encoded"] == {"latent": 7, "mask": 3, "text": 7}, result.out
    assert pictures == [1, 7, 3, 3, 1] and captions == [6, 3, 1, 1, 1, 1, 1, 1]  # a first picture tries the VAE
    assert result.err.splitlines()[-2:] == [
        "note: cpu had too little memory for 6 captions at a time, so they were encoded 1 at a time",
        "note: cpu had too little memory for 7 pictures at a time, so they were encoded 3 at a time; --batch-size 3 "
        "avoids the attempts"]
    roomy, small = rows(tmp_path / "roomy"), rows(tmp_path / "small")
    assert roomy.keys() == small.keys() and len(roomy) == 7 + 3 + 7
    for name, row in roomy.items():  # the last bits depend on what else is in a batch
        np.testing.assert_allclose(small[name], row, rtol=1e-4, atol=1e-5)
    assert not any(encode("small", "--batch-size", 1).json["encoded"].values())


def test_a_limit_for_encoders_does_nothing_on_the_cpu_and_says_so(encode):
    assert "--encoder-memory does nothing on cpu" in encode("limited", "--encoder-memory", 0.5).err
    assert "--encoder-memory" not in encode("limited", "--encoder-memory", 0.5).err, "nothing was encoded"


def test_a_device_with_room_says_nothing(encode):
    assert "memory" not in encode("roomy").err


def test_one_picture_that_does_not_fit(encode, limit, tmp_path, monkeypatch):
    probe = VaeEncoder._forward
    limit(VaeEncoder, 0)
    limited = VaeEncoder._forward
    monkeypatch.setattr(VaeEncoder, "_forward",  # the first picture is small, and fits
                        lambda self, pixels, *args: (probe if pixels.shape[1] == 64 else limited)(self, pixels, *args))
    result = encode("small")
    assert result.code == 9 and not (tmp_path / "small.json").exists()
    assert result.err == ("error: cpu has too little memory for a picture of 128x128 pixels\nhint: --compute bfloat16, "
                          "a smaller --resolution or a computer with more memory; finished rows are kept\n")
    assert result.json["error"]["kind"] == "memory"
    assert len(rows(tmp_path / "small")) == 3 + 7, "masks and text are kept"


def test_one_caption_that_does_not_fit(encode, limit):
    limit(TextEncoder, 0)
    result = encode("small", "--compute", "float32")
    assert result.code == 9 and "cpu has too little memory for a caption in the text encoder" in result.err


@pytest.mark.parametrize(("kind", "what"), [(VaeEncoder, "the VAE"), (TextEncoder, "the text encoder")])
def test_an_encoder_that_does_not_fit(encode, monkeypatch, kind, what):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(AutoencoderKL if kind is VaeEncoder else CLIPTextModel, "to", full)
    result = encode("small")
    assert result.code == 9 and f"cpu has too little memory for {what}" in result.err


@pytest.mark.parametrize("kind", [VaeEncoder, TextEncoder])
def test_a_first_try_that_does_not_fit(encode, monkeypatch, kind):
    name = "_forward" if kind is VaeEncoder else "_negative"

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kind, name, full)
    result = encode("small")
    assert result.code == 9 and "download the model again" not in result.err


def test_float32_once_more_that_does_not_fit_leaves_the_encoder_as_it_was(tiny_model, monkeypatch):
    encoder = VaeEncoder(tiny_model, device="cpu", compute="bfloat16", dtype="float32")

    def forward(pixels, dtype):
        if dtype == torch.float32:
            raise torch.OutOfMemoryError
        return {"latent": torch.full((len(pixels), 4, 8, 8), float("nan"))}

    monkeypatch.setattr(encoder, "_forward", forward)
    with pytest.raises(Exception, match="too little memory"):
        encoder.encode(np.zeros((2, 64, 64, 3), np.uint8))
    assert encoder._vae.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [(), ("--dry-run", "--measure")])
def test_no_text_encoder_is_in_memory_while_the_vae_is_loaded(encode, monkeypatch, options):
    load, load_vae, encoders, left = encoding.load_encoder, vaes.load_vae, [], []

    def watched(*args):
        encoders.append(weakref.ref(found := load(*args)))
        return found

    def look(*args):
        left.append([one() for one in encoders if one() is not None])
        return load_vae(*args)

    monkeypatch.setattr(encoding, "load_encoder", watched)
    monkeypatch.setattr(vaes, "load_vae", look)
    before = gc.get_threshold()
    gc.set_threshold(0)  # by chance, the collector would find it
    try:
        assert encode("cache", *options).code == 0
    finally:
        gc.set_threshold(*before)
    assert encoders and left == [[]]
