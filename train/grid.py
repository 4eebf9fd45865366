"""Sample pictures as files: the only room of Pillow in the trainer."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

_STRIP = 14  # pixels of height for a line of words
_LETTER = 6  # pixels of width of Pillow's built-in letters


def grid_png(pictures: Sequence[np.ndarray], labels: Sequence[str], columns: int) -> bytes:
    """A PNG of `pictures` (uint8 [H, W, 3], all of one size) in rows of `columns`, each below its label."""
    height, width = pictures[0].shape[:2]
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * width, rows * (height + _STRIP)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        left, top = number % columns * width, number // columns * (height + _STRIP)
        draw.text((left + 2, top + 1), _fit(label, width), fill="black")
        sheet.paste(Image.fromarray(picture), (left, top + _STRIP))
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


def _fit(text: str, width: int) -> str:
    """`text` in letters that the built-in font has, cut to `width` pixels."""
    spelled = text.encode("latin-1", "replace").decode("latin-1")
    room = max(width // _LETTER - 1, 3)
    return spelled if len(spelled) <= room else spelled[: room - 2] + ".."
