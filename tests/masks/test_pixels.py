"""Maps become masks: cut, blurred, grown, inverted, combined; each against a computation of its own."""

from __future__ import annotations

import numpy as np
import pytest
from pictures import saved
from PIL import Image, ImageFilter

from prep.images.formats.parts import BadPicture
from prep.masks.methods import MaskOptions
from prep.masks.pixels import combined, dilate, finish_map, luma_map, read_mask, scaled

NOISE = np.random.default_rng(5).integers(0, 256, (23, 17), dtype=np.uint8)


def finish(gray, **choice):
    return finish_map(gray, MaskOptions(**{"method": "alpha", **choice}))


def test_luma_is_that_of_itu_601():
    pixels = np.random.default_rng(1).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    weighted = (pixels.astype(np.int64) @ np.array([19595, 38470, 7471]) + (1 << 15)) >> 16  # 0.299, 0.587, 0.114
    assert (luma_map(saved(Image.fromarray(pixels))) == weighted).all()


def test_a_pixel_at_the_threshold_trains():
    levels = np.arange(256, dtype=np.uint8)[None]
    assert (finish(levels, method="threshold", threshold=0.4) == np.where(levels >= 102, 255, 0)).all()
    assert (finish(levels, method="threshold") == np.where(levels >= 128, 255, 0)).all()  # 127.5 is half
    assert (finish(levels, threshold=1.0) == np.where(levels == 255, 255, 0)).all()
    assert finish(levels) is levels  # alpha stays gray


@pytest.mark.parametrize("pixels", [-9, -3, -2, -1, 0, 1, 2, 5, 6, 30])
def test_growing_takes_the_greatest_around_and_shrinking_the_least(pixels):
    reach, pick = abs(pixels), max if pixels > 0 else min
    wanted = [[pick(NOISE[max(0, y - reach):y + reach + 1, max(0, x - reach):x + reach + 1].flat) for x in range(17)]
              for y in range(23)]
    assert (dilate(NOISE, pixels) == np.array(wanted)).all()


def test_smoothing_comes_before_the_cut_and_takes_specks_away():
    gray = np.zeros((40, 60), np.uint8)
    gray[:, 30:] = 255
    gray[10, 10] = 255
    clean = finish(gray, smooth=3, threshold=0.5)
    assert not clean[:, :30].any() and (clean[:, 30:] == 255).all()
    soft = finish(gray, smooth=3)
    assert (soft == np.asarray(Image.fromarray(gray).filter(ImageFilter.GaussianBlur(3)))).all()
    assert 0 < soft[30, 28] < 128 < soft[30, 32] < 255


def test_what_trains_after_inverting_is_expanded():
    gray = np.full((9, 9), 255, np.uint8)
    gray[4, 4] = 0
    wanted = np.zeros((9, 9), np.uint8)
    wanted[2:7, 2:7] = 255
    assert (finish(gray, invert=True, expand=2) == wanted).all()
    assert (finish(gray, invert=True, expand=-1) == 0).all()


def test_combining_grays():
    new, old = (np.array([row], np.uint8) for row in ([0, 100, 200, 255], [50, 150, 150, 255]))
    assert combined(new, old, "replace").tolist() == [[0, 100, 200, 255]]
    assert combined(new, old, "add").tolist() == [[50, 150, 200, 255]]
    assert combined(new, old, "subtract").tolist() == [[50, 50, 0, 0]]
    assert combined(new, old, "intersect").tolist() == [[0, 100, 150, 255]]


def test_combining_with_no_mask():
    new = np.array([[0, 100, 255]], np.uint8)
    for how in ("replace", "add", "intersect"):
        assert combined(new, None, how) is new
    assert combined(new, None, "subtract").tolist() == [[255, 155, 0]]


def test_masks_are_scaled_to_their_picture_when_they_have_its_shape():
    data = saved(Image.fromarray(np.repeat(np.array([[0, 255]], np.uint8), 8, 0).repeat(8, 1)))
    assert read_mask(data, None).shape == (8, 16)
    mask = read_mask(data, (64, 32))
    assert mask.shape == (32, 64) and not mask[:, :28].any() and (mask[:, 36:] == 255).all()
    with pytest.raises(BadPicture, match="mask has 16x8 pixels, not its picture's shape") as caught:
        read_mask(data, (32, 32))
    assert caught.value.code == "mask-size-mismatch"


def test_maps_cover_the_whole_picture():
    corners = np.array([[0, 255], [255, 0]], np.uint8)
    large = scaled(corners, (100, 60))
    assert large.shape == (60, 100)
    assert (large[0, 0], large[0, -1], large[-1, 0], large[-1, -1]) == (0, 255, 255, 0)
