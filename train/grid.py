"""Sample pictures as files: the only room of Pillow in the trainer."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from prep.records import Size

_STRIP = 14  # pixels of height for a line of words
_LETTER = 6  # pixels of width of Pillow's built-in letters


def grid_png(rows: Sequence[Sequence[np.ndarray]], labels: Sequence[str], heads: Sequence[str] = ()) -> bytes:
    """A PNG of pictures in rows (uint8 [H, W, 3], all of one size), a label above each row, heads above columns."""
    height, width = rows[0][0].shape[:2]
    columns = max(len(row) for row in rows)
    top = _STRIP if heads else 0
    sheet = Image.new("RGB", (columns * width, top + len(rows) * (height + _STRIP)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, head in enumerate(heads):
        draw.text((column * width + 2, 1), _fit(head, (width, _STRIP)), fill="black")
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        above = top + number * (height + _STRIP)
        draw.text((2, above + 1), _fit(label, (columns * width, _STRIP)), fill="black")
        for column, picture in enumerate(row):
            sheet.paste(Image.fromarray(picture), (column * width, above + _STRIP))
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


def _fit(text: str, size: Size) -> str:
    """`text` as the built-in letters can write it, cut to the width."""
    spelled = text.encode("latin-1", "replace").decode("latin-1")
    room = max(size[0] // _LETTER - 1, 1)
    return spelled if len(spelled) <= room else spelled[: max(room - 2, 0)] + ".."
