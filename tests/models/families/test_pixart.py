"""PixArt's text rows: without padding, of lower-cased captions that are not cleaned.

How PixArt's transformer is loaded and called.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from diffusers import PixArtTransformer2DModel

from prep.models.configs import Configs
from prep.models.denoiser.samplers import DIFFUSION, LIBRARIES
from prep.models.families.pixart import ALPHA, SIGMA
from prep.models.family import Conditions, TextOptions
from prep.models.text.lengths import LengthCounter
from prep.recipe.prompts import PromptSettings
from prep.training.schema import Sampling
from train.config.load import parse
from train.models.denoiser import Denoiser, load, predict
from train.sampling.prompts import PromptRows
from train.sampling.sampler import _denoise, _pipeline

CPU = torch.device("cpu")
LONG = "a caption (with brackets) of many words " * 10


@pytest.fixture(scope="module")
def alpha() -> object:
    return tiny_pipelines.build("pixart_alpha")


def rows(pipeline, captions, most=120):
    with torch.no_grad():
        return [row["hidden"] for row in ALPHA.text.encode(pipeline, captions, TextOptions(max_length=most), CPU)]


def test_rows_have_a_caption_s_tokens_and_no_padding(alpha):
    short, long = rows(alpha, ["a cat", LONG])
    assert short.shape == (len(alpha.tokenizer("a cat")["input_ids"]), 32)
    assert long.shape == (120, 32)


def test_captions_are_lower_cased_and_keep_their_signs(alpha):
    one, two, three = rows(alpha, ["  A (red) CAT\n", "a (red) cat", "a red cat"])
    assert torch.allclose(one, two, atol=1e-6)
    assert len(three) < len(two)


@pytest.mark.parametrize(("family", "most"), [(ALPHA, 120), (SIGMA, 300)], ids=["alpha", "sigma"])
def test_lengths_are_counted(family, most, tmp_path: Path):
    model = tiny_pipelines.save(family.name, tmp_path / "model")
    options = TextOptions(max_length=family.text.max_length)
    assert dict(family.text.shapes(Configs(model), options)) == {"hidden": (most, 32)}
    counter = LengthCounter(model, family, options)
    tokens = len(tiny_pipelines.build(family.name).tokenizer("a cat in the rain")["input_ids"])
    assert counter.groups(["a", "a cat in the rain", LONG]) == [16, -(-tokens // 16) * 16, -(-most // 16) * 16]
    assert counter.unconditional() == 16


def loaded(model: Path) -> Denoiser:
    return load(model, parse({"precision": "fp32"}, ""), "epsilon", CPU, adapt=False)


def given(sizes: list[float]) -> Conditions:
    text = {"hidden": torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0)),
            "attention_mask": torch.ones(1, 16, dtype=torch.uint8)}
    return Conditions(text=text, sizes_B6=torch.tensor([sizes]))


def answer(denoiser: Denoiser, sizes: list[float]) -> Any:
    noised = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return predict(denoiser, noised, torch.tensor([500]), given(sizes))


def test_alpha_is_told_the_picture_s_size_and_the_bucket_s_aspect_ratio(tmp_path):
    denoiser = loaded(tiny_pipelines.save("pixart_alpha", tmp_path / "model"))
    seen = []
    denoiser.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    usual = answer(denoiser, [1001.0, 1500.0, 3.0, 4.0, 512.0, 1024.0])
    told = seen[0]["added_cond_kwargs"]
    assert told["resolution"].tolist() == [[1001.0, 1500.0]] and told["aspect_ratio"].tolist() == [[0.5]]
    assert not torch.allclose(usual, answer(denoiser, [64.0, 64.0, 0.0, 0.0, 512.0, 1024.0]), atol=1e-4)


def test_sigma_is_not(tmp_path):
    denoiser = loaded(tiny_pipelines.save("pixart_sigma", tmp_path / "model"))
    one, other = (answer(denoiser, [side, side, 0.0, 0.0, 64.0, 64.0]) for side in (64.0, 1000.0))
    assert one.shape == (1, 4, 8, 8) and torch.equal(one, other)


def test_the_class_that_alpha_was_published_with_is_loaded_as_pixart_s(tmp_path):
    model = tiny_pipelines.save("pixart_alpha", tmp_path / "model")
    usual = answer(loaded(model), [64.0, 64.0, 0.0, 0.0, 64.0, 64.0])
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "transformer": ["diffusers", "Transformer2DModel"]}))
    config = json.loads((model / "transformer" / "config.json").read_text())
    (model / "transformer" / "config.json").write_text(json.dumps({**config, "_class_name": "Transformer2DModel",
                                                                   "norm_type": "ada_norm_single"}))
    denoiser = loaded(model)
    assert type(denoiser.model) is PixArtTransformer2DModel
    assert torch.equal(usual, answer(denoiser, [64.0, 64.0, 0.0, 0.0, 64.0, 64.0]))


@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # of diffusers with NumPy 2
@pytest.mark.parametrize("family", ["pixart_alpha", "pixart_sigma"])
def test_one_step_of_every_sampler_makes_a_picture(family, tmp_path):
    """Alpha's pipeline takes the second of what a scheduler returns then, and many return one thing."""
    model = tiny_pipelines.save(family, tmp_path / "model")
    denoiser, text = loaded(model), given([64.0] * 6).text
    prompt = PromptRows(prompt="a cat", settings=PromptSettings(), positive=text, negative=text)
    with tiny_pipelines.known_warnings(), torch.no_grad():
        for sampler in (None, *(name for name in DIFFUSION if name not in LIBRARIES)):
            pipeline = _pipeline(denoiser, model, sampler)
            one, again = (_denoise(denoiser, pipeline, None, prompt, (64, 64), Sampling(steps=1, guidance=2.0))
                          for _ in range(2))
            assert torch.isfinite(one).all() and torch.equal(one, again), sampler
