"""`prep encode --tile`: large pictures are encoded in overlapping tiles, and their keys say so."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage
from pictures import draw
from row_values import read_row
from tiny_pipelines import vaes

from prep.cache.reader import Reader
from prep.images.decode import decode_picture
from prep.loader.index import open_index
from prep.manifest.document import read_manifest
from prep.models.vae import decode, posterior, use_tiles

SMALL = ("--resolution", 256, "--step", 64, "--dtype", "float32", "--device", "cpu", "--upscale", "never", "--json")


@pytest.fixture
def encode(prep, tiny_model, tmp_path):
    for name, size in (("large", (320, 192)), ("small", (128, 128))):
        draw(tmp_path / "photos" / f"{name}.png", size, seed=len(name)).with_suffix(".txt").write_text("a picture")

    def go(*options, name="m.json", code=0):
        result = prep("encode", tmp_path / "photos", "--model", tiny_model, "--cache", tmp_path / "cache",
                      "-o", tmp_path / name, *SMALL, *options)
        assert result.code == code, result.err
        return result

    return go


def latents(path):
    """The latent of each sample, by name."""
    index = open_index(read_manifest(path))
    reader, views, found = Reader(index.cache), index.samples.views, {}
    for sample in range(len(index.samples)):
        view = int(index.samples.view_offsets[sample])
        place = index.ref(int(views["latent_shard"][view]), int(views["latent_row"][view]))
        found[index.samples.name(sample)] = read_row(reader, place.shard, "latent", place.row)
    return found


def test_only_large_pictures_differ_and_all_keys_do(encode, tiny_model, tmp_path):
    encode()
    assert encode("--tile", 128, name="tiled.json").json["encoded"] == {"latent": 2, "mask": 0, "text": 0}
    whole, tiled = latents(tmp_path / "m.json"), latents(tmp_path / "tiled.json")
    contexts = [json.loads((tmp_path / name).read_bytes())["fields"]["latent"]["context"]
                for name in ("m.json", "tiled.json")]
    assert contexts[1] == {**contexts[0], "tile": 128} and "tile" not in contexts[0]
    assert np.array_equal(whole["small.png"], tiled["small.png"])
    assert not np.allclose(whole["large.png"], tiled["large.png"], atol=1e-3)
    vae = AutoencoderKL.from_pretrained(tiny_model / "vae", low_cpu_mem_usage=False)
    picture = decode_picture((tmp_path / "photos" / "large.png").read_bytes(), alpha="white")
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        assert np.allclose(tiled["large.png"], by_hand(vae, pixels)[0].numpy(), atol=1e-5)


def by_hand(vae, pixels):
    """Tiles of 128 pixels at every 96, each blended into the last quarter of the one before it and of that above."""
    high, wide = pixels.shape[-2:]
    rows = [[vae.encode(pixels[..., top:top + 128, left:left + 128]).latent_dist.parameters
             for left in range(0, wide, 96)] for top in range(0, high, 96)]
    cells = 128 // (pixels.shape[-1] // vae.encode(pixels).latent_dist.mean.shape[-1])
    seam = cells // 4
    for down, row in enumerate(rows):
        for right, tile in enumerate(row):
            for before, dim in ((rows[down - 1][right] if down else None, 2), (row[right - 1] if right else None, 3)):
                for at in range(0 if before is None else min(seam, tile.shape[dim], before.shape[dim])):
                    last = before.select(dim, before.shape[dim] - seam + at)
                    tile.select(dim, at).copy_(last * (1 - at / seam) + tile.select(dim, at) * (at / seam))
    keep = cells - seam
    joined = torch.cat([torch.cat([tile[..., :keep, :keep] for tile in row], 3) for row in rows], 2)
    return joined.chunk(2, dim=1)[0]


@pytest.mark.parametrize("make", [vaes.qwen_image, vaes.flux2, vaes.deep_compression])
def test_other_encoders_make_latents_of_the_same_shape(make):
    vae = make().eval()
    assert isinstance(vae, AutoencoderKLQwenImage | AutoencoderKLFlux2 | AutoencoderDC)
    picture = torch.rand(1, 3, 192, 256, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        whole = posterior(vae, picture).mean_BChw
        use_tiles(vae, 128)
        tiled, small = posterior(vae, picture).mean_BChw, posterior(vae, picture[..., :128, :128]).mean_BChw
        assert tiled.shape == whole.shape and not torch.equal(tiled, whole)
        vae.use_tiling = False
        assert torch.equal(small, posterior(vae, picture[..., :128, :128]).mean_BChw)


@pytest.mark.few("sdxl")
@pytest.mark.parametrize("make", [vaes.sdxl, vaes.qwen_image, vaes.qwen_image_21, vaes.flux2, vaes.deep_compression])
def test_a_picture_that_memory_does_not_hold_is_decoded_in_tiles(make, monkeypatch):
    """A tile of 512 pixels is the largest that this device holds."""
    vae = make().eval()
    with torch.no_grad():
        channels = posterior(vae, torch.zeros(1, 3, 64, 64)).mean_BChw.shape[1]
        factor = decode(vae, torch.zeros(1, channels, 8, 8)).shape[-1] // 8
        latent = torch.randn(1, channels, 640 // factor, 512 // factor, generator=torch.Generator().manual_seed(0))
        whole = decode(vae, latent)
    asked, real = [], vae.decoder.forward

    def small(given, *args, **kwargs):
        asked.append(given.shape[-2] * factor)
        if asked[-1] > 512:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(given, *args, **kwargs)

    monkeypatch.setattr(vae.decoder, "forward", small)
    with torch.no_grad():
        found, again = decode(vae, latent), decode(vae, latent)
    assert asked.count(640) == 1 and max(asked[1:]) == 512
    assert found.shape == whole.shape and not found.equal(whole) and again.equal(found)
    assert float((found - whole).square().mean()) < 0.25 * float(whole.square().mean())


def test_other_errors_of_a_decoder_stay(monkeypatch):
    vae = vaes.sdxl().eval()
    monkeypatch.setattr(vae.decoder, "forward", lambda *args: (_ for _ in ()).throw(RuntimeError("of the decoder")))
    with pytest.raises(RuntimeError, match="of the decoder"), torch.no_grad():
        decode(vae, torch.zeros(1, vae.config.latent_channels, 8, 8))


@pytest.mark.parametrize(("side", "said"), [
    (100, "model.tile is 100, expected 0 or a multiple of 128 pixels"),
    (-128, "model.tile is -128, expected"), (1 << 20, "model.tile is 1048576, expected"),
])
def test_sides_that_are_refused(encode, side, said):
    assert said in encode("--tile", side, code=3).err
