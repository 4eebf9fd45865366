"""Sample pictures as files: the only room of Pillow in the trainer."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

_STRIP = 14  # pixels of height for a line of words
_READABLE = 192  # pixels of width, at least, for a picture and its words


def grid_png(pictures: Sequence[np.ndarray], labels: Sequence[str], columns: int) -> bytes:
    """A PNG of `pictures` (uint8 [H, W, 3], all of one size) in rows of `columns`, each below its label.

    Small ones are shown larger, by a whole factor, so that there is room for words.
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
    """`text` in letters that the built-in font has, its end cut off where it is wider than `width` pixels."""
    spelled = text.encode("latin-1", "replace").decode("latin-1")[:200]
    while spelled and draw.textlength(spelled) > width:
        spelled = spelled[:-1]
    return spelled
