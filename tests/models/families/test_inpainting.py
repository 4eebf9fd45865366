"""Masks of families that inpaint: their numbers, and the pictures under them, are those of diffusers' pipelines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from torch.nn import functional

from prep.geometry import Placement
from prep.images.decode import scale_and_crop
from prep.images.mask import WHITE, hole_cells, mask_picture, place_hole
from prep.models.families.registry import FAMILIES

INPAINTING = [name for name, family in FAMILIES.items() if family.inpainting is not None]
SIZE = (96, 64)
WHOLE = Placement(scaled=SIZE, crop=(0, 0), bucket=SIZE)


def every_value() -> Image.Image:
    """A mask with each value of a byte, in no order of latent cells."""
    values = np.random.default_rng(0).permutation(np.arange(SIZE[0] * SIZE[1]) % 256).astype(np.uint8)
    return Image.fromarray(values.reshape(SIZE[1], SIZE[0]))


@pytest.mark.parametrize("name", INPAINTING)
def test_masks_and_hidden_pictures_are_the_pipeline_s(name):
    family, pipeline = FAMILIES[name], tiny_pipelines.build(name)
    mask = every_value()
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*SIZE[::-1], 3), np.uint8))
    theirs = pipeline.mask_processor.preprocess(mask, height=SIZE[1], width=SIZE[0])
    hole = place_hole(mask, WHOLE)
    assert np.array_equal(theirs[0, 0].numpy() * 255, hole) and set(np.unique(hole)) == {0, 255}
    if family.inpainting.cell == "first":
        wanted = functional.interpolate(theirs, size=(SIZE[1] // 8, SIZE[0] // 8))
    else:
        wanted = functional.pixel_unshuffle(theirs, 8)
    assert np.array_equal(wanted[0].numpy() * 255, hole_cells(hole, family.factor, family.inpainting.cell))
    shape = (8, 12) if family.inpainting.cell == "first" else hole.shape
    assert np.array_equal(mask_picture(hole_cells(hole, family.factor, family.inpainting.cell)),
                          hole[::hole.shape[0] // shape[0], ::hole.shape[1] // shape[1]])
    shown = pipeline.image_processor.preprocess(picture, height=SIZE[1], width=SIZE[0]) * (theirs < 0.5)
    mine = torch.from_numpy(np.dstack([scale_and_crop(picture, WHOLE), 255 - hole])).permute(2, 0, 1)[None]
    mine = mine.float().div_(127.5).sub_(1)
    assert torch.allclose(mine[:, :3] * (mine[:, 3:] > 0), shown, atol=1e-6)


def test_white_begins_at_half():
    mask = Image.fromarray(np.array([[0, WHITE - 1, WHITE, 255]], np.uint8))
    assert place_hole(mask, Placement(scaled=(4, 1), crop=(0, 0), bucket=(4, 1))).tolist() == [[0, 0, 255, 255]]


@pytest.mark.parametrize("name", INPAINTING)
def test_a_denoiser_is_given_as_many_channels_as_its_config_says(name):
    family, pipeline = FAMILIES[name], tiny_pipelines.build(name)
    width = next(wide for key, (_, wide) in family.config_widths.items() if key == "in_channels")
    assert getattr(pipeline, family.denoiser).config.in_channels == width * family.input_channels
