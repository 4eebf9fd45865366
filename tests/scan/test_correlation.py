"""Copies are found however they were cut, resized, brightened or mirrored; other pictures are not."""

from __future__ import annotations

import pytest
from PIL import Image
from scenes import COPIES, ORIGINAL, scene, thumb

from prep.scan.duplicates.correlation import near_duplicates


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
