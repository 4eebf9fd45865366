"""Masks that are drawn by chance: the same bits everywhere, of the shapes and sizes that are promised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prep.digest import digest_bytes
from prep.geometry import Placement
from prep.images.drawn_mask import drawn_hole

PLACED = Placement(scaled=(72, 64), crop=(4, 0), bucket=(64, 64))
PICTURES = [f"{number:064x}" for number in range(400)]


def covered(size: tuple[int, int], count: int) -> np.ndarray:
    placement = Placement(scaled=size, crop=(0, 0), bucket=size)
    return np.array([drawn_hole(picture, placement).mean() / 255 for picture in PICTURES[:count]])


def test_the_same_view_has_the_same_bits_for_ever() -> None:
    """Strokes, boxes with and without round corners, and whole pictures; raise `DRAWN_MEANING` if this changes."""
    drawn = [drawn_hole(picture, PLACED) for picture in PICTURES[:40]]
    assert all(hole.shape == (64, 64) and set(np.unique(hole)) <= {0, 255} for hole in drawn)
    assert digest_bytes(b"".join(hole.tobytes() for hole in drawn)) == (
        "266c6b4020271a87cb44a7acbc73b37b3c3ef07abbc8fd4fc1cab4f3742b81f9")


@pytest.mark.parametrize("other", [replace(PLACED, flip=True), replace(PLACED, crop=(5, 0)),
                                   replace(PLACED, scaled=(73, 64))])
def test_each_view_has_its_own(other: Placement) -> None:
    same = sum(np.array_equal(drawn_hole(picture, PLACED), drawn_hole(picture, other)) for picture in PICTURES)
    assert same < len(PICTURES) / 8, "but for those that are painted whole by both"


def test_a_quarter_is_painted_whole_and_the_rest_in_part() -> None:
    parts = covered((64, 64), 400)
    assert 0.2 < (parts == 1).mean() < 0.3 and parts.min() > 0
    assert 0.35 < np.median(parts[parts < 1]) < 0.5


def test_shapes_grow_with_the_picture() -> None:
    small, large = (covered(size, 100) for size in ((128, 128), (256, 256)))
    assert abs(np.median(small) - np.median(large)) < 0.1
    assert covered((1216, 832), 20).min() > 0, "more rows than are drawn at once"


def test_every_few_pixels_are_those_of_the_whole() -> None:
    for picture in PICTURES[:20]:
        assert np.array_equal(drawn_hole(picture, PLACED, every=8), drawn_hole(picture, PLACED)[::8, ::8])
