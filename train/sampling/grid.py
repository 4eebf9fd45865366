"""Encodes sample pictures as PNG files, and cuts such a picture into its parts again."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from prep.geometry import Size

_STRIP = 14  # height of a label in pixels
_READABLE = 192  # minimum width of a picture with its label, in pixels


def columns_of(count: int) -> int:
    """The number of columns that makes a grid of `count` pictures about square."""
    return math.ceil(math.sqrt(count))


def grid_png(pictures: Sequence[np.ndarray], labels: Sequence[str], columns: int) -> bytes:
    """A PNG of `pictures` (uint8 [H, W, 3]) in rows of `columns`, each below its label.

    Cells have the size of the largest picture. Small pictures are enlarged by an integer factor to fit their labels.
    """
    factor, width, height = _cell([(picture.shape[1], picture.shape[0]) for picture in pictures])
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * width, rows * (height + _STRIP)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        left, top = number % columns * width, number // columns * (height + _STRIP)
        draw.text((left + 2, top + 1), _fit(draw, label, width - 4), fill="black")
        shown = picture.repeat(factor, axis=0).repeat(factor, axis=1)
        sheet.paste(Image.fromarray(shown), (left, top + _STRIP))
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


def cut_grid(sheet_HW3: np.ndarray, sizes: Sequence[Size]) -> list[np.ndarray]:
    """The pictures of these sizes in a grid that is about square, uint8 [H, W, 3] each; none if it is not such a grid.
    """
    if not sizes:
        return []
    (factor, width, height), columns = _cell(sizes), columns_of(len(sizes))
    if sheet_HW3.shape != (-(-len(sizes) // columns) * (height + _STRIP), columns * width, 3):
        return []
    cut = []
    for number, (wide, high) in enumerate(sizes):
        left, top = number % columns * width, number // columns * (height + _STRIP) + _STRIP
        cut.append(sheet_HW3[top : top + factor * high : factor, left : left + factor * wide : factor])
    return cut


def _cell(sizes: Sequence[Size]) -> tuple[int, int, int]:
    """The factor by which pictures of these sizes are enlarged, and width and height of a cell without its label."""
    factor = -(-_READABLE // max(width for width, _ in sizes))
    return factor, factor * max(width for width, _ in sizes), factor * max(height for _, height in sizes)


def _fit(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """`text` in the built-in font's characters, truncated to `width` pixels."""
    spelled = text.encode("latin-1", "replace").decode("latin-1")[:200]
    while spelled and draw.textlength(spelled) > width:
        spelled = spelled[:-1]
    return spelled
