"""Copies are found however they were cut, resized, brightened or mirrored; other pictures are not."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageFilter

from prep.scan.duplicates.correlation import near_duplicates
from prep.scan.duplicates.identity import sampled, thumb_of


def scene(seed: int, size=(360, 300)) -> Image.Image:
    """Something with large and small shapes, as photos have."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    fine = Image.fromarray(rng.integers(0, 256, (60, 60, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return Image.blend(small, fine, 0.25)


def thumb(picture: Image.Image):
    return thumb_of(sampled(picture), picture.size)


def jpeg(picture: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=60)
    return Image.open(stream).convert("RGB")


ORIGINAL = scene(0)
COPIES = {
    "same": ORIGINAL,
    "smaller": jpeg(ORIGINAL.resize((150, 125))),
    "brighter": ORIGINAL.point(lambda value: min(255, value * 0.8 + 50)),
    "blurred": ORIGINAL.filter(ImageFilter.GaussianBlur(2)),
    "right part": jpeg(ORIGINAL.crop((120, 0, 360, 300))),
    "top part": ORIGINAL.crop((0, 0, 360, 190)),
    "middle, half of it": ORIGINAL.crop((90, 0, 270, 300)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("mirrored", [False, True])
def test_copies_are_found(how, mirrored):
    copy = COPIES[how].transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else COPIES[how]
    (near,) = near_duplicates([thumb(scene(1)), thumb(ORIGINAL), thumb(scene(2)), thumb(copy)])
    assert (near.first, near.second, near.mirrored) == (1, 3, mirrored)
    assert 0.93 <= near.score <= 1.0001


def test_other_pictures_are_not_copies():
    assert near_duplicates([thumb(scene(seed, (200 + 10 * seed, 300))) for seed in range(30)]) == ()


@pytest.mark.parametrize("size", [(64, 64), (1, 1), (300, 10), (10, 300), (1, 500), (900, 1)])
def test_flat_and_odd_pictures_are_like_nothing(size):
    flat = Image.new("RGB", size, (90, 90, 90))
    assert near_duplicates([thumb(flat), thumb(flat.resize((80, 80))), thumb(ORIGINAL)]) == ()


def test_nothing_and_one():
    assert near_duplicates([]) == ()
    assert near_duplicates([thumb(ORIGINAL)]) == ()
