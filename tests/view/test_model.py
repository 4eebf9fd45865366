"""With --model: tokens as the text encoders read them, those that are cut off, and latents decoded by the VAE."""

from __future__ import annotations

import io
import shutil

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from viewing import viewing_here

from prep.errors import ModelError
from prep.view.model import ViewedModel


@pytest.fixture
def made(make):
    return make()


def test_tokens_and_those_that_are_cut_off(made, tiny_model):
    viewed = ViewedModel(tiny_model, made.manifest)
    (reading,) = viewed.readings("a red circle 🐕 on a striped ground, " * 9)
    assert reading.encoder == "CLIP" and reading.read == 75 < len(reading.tokens)  # of 77, with start and end
    assert [read for _, read in reading.tokens] == [True] * 75 + [False] * (len(reading.tokens) - 75)
    assert [word for word, _ in reading.tokens[:8]] == ["a", "red", "circle", "🐕", "…", "…", "…", "on"]
    (short,) = viewed.readings("a")
    assert short.read == len(short.tokens) == 1 and viewed.readings("")[0].tokens == ()


def test_a_decoded_latent(made, tiny_model):
    latent = next(iter(made.latents.values()))
    vae = diffusers.AutoencoderKL.from_pretrained(tiny_model / "vae")
    with torch.inference_mode():
        wanted = vae.decode(torch.from_numpy(latent)[None]).sample[0]
    wanted = ((wanted.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    shown = np.asarray(Image.open(io.BytesIO(ViewedModel(tiny_model, made.manifest).decode(latent))))
    assert np.array_equal(shown, wanted)


@pytest.mark.parametrize(("part", "told"), [("vae", "VAE"), ("text_encoder", "text encoder")])
def test_a_model_that_did_not_make_the_cache(made, tiny_model, tmp_path, prep, part, told):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = next((other / part).glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=f"the {told} of .*other did not make this cache: it is "):
        ViewedModel(other, made.manifest)
    result = prep("view", made.path, "--model", other)
    assert result.code == 6 and "hint: pass the model that encoded the cache: --model\n" in result.err


def test_a_model_that_is_none(made, prep, tmp_path):
    assert prep("view", made.path, "--model", tmp_path / "none").code == 6


def test_the_page_of_a_sample(made, tiny_model, monkeypatch):
    with viewing_here(made.path, model=tiny_model) as server:
        text = server.get("/sample/0").text
        assert "CLIP reads 13 tokens" in text and "<del>" not in text and "Decode the latent" in text
        short = ViewedModel.readings
        monkeypatch.setattr(ViewedModel, "readings", lambda self, caption: short(self, "<b>" * 30 + caption))
        text = server.get("/sample/0").text
        assert "CLIP reads 75 of 103 tokens" in text and text.count("<del>") == 28
        assert "<span>&lt;</span>" in text and "<b>" not in text
        picture = Image.open(io.BytesIO(server.get("/decode/0/0").body))
        samples = made.samples[0]
        assert picture.size == samples.bucket
        assert server.get("/decode/0/1").status == server.get("/decode/99/0").status == 404
    with viewing_here(made.path) as server:
        text = server.get("/sample/0").text
        assert "tokens" not in text and "Decode" not in text and server.get("/decode/0/0").status == 404
