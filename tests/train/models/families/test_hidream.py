"""How HiDream's transformer and pipeline are called, whatever the picture's size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.families.hidream import largest_area
from train.models.families.hidream import DENOISER
from train.models.family import Conditions


def answer(transformer, cells):
    generator = torch.Generator().manual_seed(0)
    text = {"t5": torch.randn(2, 8, 32, generator=generator), "llama": torch.randn(2, 2, 8, 32, generator=generator),
            "pooled": torch.randn(2, 64, generator=generator)}
    noised = torch.randn(2, 16, *cells, generator=generator)
    with torch.no_grad():
        return DENOISER.predict(transformer, noised, torch.tensor([0.5, 0.2]),
                                Conditions(text=text, sizes_B6=torch.zeros(2, 6)))


@pytest.mark.parametrize("cells", [(4, 4), (2, 6), (6, 4)])
def test_training_predicts_what_sampling_does(cells):
    """In training the transformer returns patches, and lets gradients through its experts."""
    transformer = tiny_pipelines.build("hidream", whole=False).transformer
    usual = answer(transformer.eval(), cells)
    assert usual.shape == (2, 16, *cells)
    assert torch.allclose(answer(transformer.train(), cells), usual, atol=1e-5)



def test_the_pipeline_keeps_every_size():
    """As `__call__` computes it: the asked sides times the root of the ratio of areas, rounded down to 16."""
    for width in range(16, 2049, 16):
        for height in range(16, 2049, 272):
            pipeline = SimpleNamespace(default_sample_size=128)
            DENOISER.prepare(pipeline, (width, height))
            scale = ((pipeline.default_sample_size * 8) ** 2 / (width * height)) ** 0.5
            assert (int(width * scale // 16 * 16), int(height * scale // 16 * 16)) == (width, height)


@pytest.mark.parametrize(("config", "most"), [({}, 1024 * 1024), ({"max_resolution": [16, 32]}, 128 * 256),
                                              ({"max_resolution": None}, None), ({"max_resolution": [16]}, None),
                                              ({"max_resolution": ["a", 1]}, None)])
def test_the_largest_area_is_that_of_the_patches_it_pads_to(config, most):
    assert largest_area(config) == most


def test_a_picture_beyond_it_is_one_that_the_transformer_cannot_take():
    transformer = tiny_pipelines.build("hidream").transformer  # 16 x 16 cells
    assert answer(transformer, (8, 32)).shape == (2, 16, 8, 32)
    with pytest.raises(RuntimeError):
        answer(transformer, (10, 32))
    assert answer(transformer, (20, 20)).shape == (2, 16, 20, 20)
