"""How PixArt's transformer is loaded and called."""

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

from train.config.load import parse
from train.models.denoiser import Denoiser, load, predict
from train.models.family import Conditions

CPU = torch.device("cpu")


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
