"""Sample pictures as PNG files; the only module of the trainer that uses Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

_STRIP = 14  # height of a label in pixels
_READABLE = 192  # minimum width of a picture with its label, in pixels


def grid_png(pictures: Sequence[np.ndarray], labels: Sequence[str], columns: int) -> bytes:
    """A PNG of `pictures` (uint8 [H, W, 3], all of one size) in rows of `columns`, each below its label.

    Small pictures are enlarged by a whole factor, to make room for labels.
    """
    factor = -(-_READABLE // pictures[0].shape[1])
    height, width = (factor * side for side in pictures[0].shape[:2])
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


def _fit(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """`text` in characters of the built-in font, truncated to `width` pixels."""
    spelled = text.encode("latin-1", "replace").decode("latin-1")[:200]
    while spelled and draw.textlength(spelled) > width:
        spelled = spelled[:-1]
    return spelled
