"""Where the pictures of a grid lie; cuts a grid of sampled pictures into them (train/sampling/grid.py draws it)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from prep.geometry import Size

STRIP = 14  # height of a label in pixels
READABLE = 192  # minimum width of a picture with its label, in pixels
Pixels = np.ndarray[Any, Any]


def columns_of(count: int) -> int:
    """The number of columns that makes a grid of `count` pictures about square."""
    return math.ceil(math.sqrt(count))


def cut_grid(sheet_HW3: Pixels, sizes: Sequence[Size]) -> list[Pixels]:
    """The pictures of these sizes in a grid that is about square, uint8 [H, W, 3] each; none if it is not such a grid.
    """
    if not sizes:
        return []
    (factor, width, height), columns = cell_of(sizes), columns_of(len(sizes))
    if sheet_HW3.shape != (-(-len(sizes) // columns) * (height + STRIP), columns * width, 3):
        return []
    cut = []
    for number, (wide, high) in enumerate(sizes):
        left, top = number % columns * width, number // columns * (height + STRIP) + STRIP
        cut.append(sheet_HW3[top : top + factor * high : factor, left : left + factor * wide : factor])
    return cut


def cell_of(sizes: Sequence[Size]) -> tuple[int, int, int]:
    """The factor by which pictures of these sizes are enlarged, and width and height of a cell without its label."""
    factor = -(-READABLE // max(width for width, _ in sizes))
    return factor, factor * max(width for width, _ in sizes), factor * max(height for _, height in sizes)
