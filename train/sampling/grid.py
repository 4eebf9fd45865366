"""Encodes sample pictures as PNG files; prep/runs/grids.py cuts such a picture into its parts again."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from prep.runs.grids import STRIP, cell_of

MARK = b"tEXtSoftware\0Latentry"  # identifies our pictures, which may be replaced


def grid_png(pictures: Sequence[np.ndarray], labels: Sequence[str], columns: int) -> bytes:
    """A PNG of `pictures` (uint8 [H, W, 3], or [H, W, 4] with opacity) in rows of `columns`, each below its label.

    Transparent pixels stay so. Cells have the size of the largest picture. Small pictures are enlarged by an integer
    factor to fit their labels.
    """
    factor, width, height = cell_of([(picture.shape[1], picture.shape[0]) for picture in pictures])
    rows = -(-len(pictures) // columns)
    transparent = any((picture[..., 3:] < 255).any() for picture in pictures)
    sheet = Image.new("RGBA" if transparent else "RGB", (columns * width, rows * (height + STRIP)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        left, top = number % columns * width, number // columns * (height + STRIP)
        draw.text((left + 2, top + 1), _fit(draw, label, width - 4), fill="black")
        shown = picture.repeat(factor, axis=0).repeat(factor, axis=1)
        sheet.paste(Image.fromarray(shown), (left, top + STRIP))
    notes, out = PngInfo(), io.BytesIO()
    notes.add_text("Software", "Latentry")
    sheet.save(out, "PNG", pnginfo=notes)
    return out.getvalue()


def beside(pictures: Sequence[np.ndarray], height: int) -> np.ndarray:
    """Pictures (uint8 [H, W, 3] or [H, W, 4]) side by side as one, all scaled to this height."""
    scaled = [picture if picture.shape[0] == height else np.asarray(Image.fromarray(picture).resize(
        (max(1, round(picture.shape[1] * height / picture.shape[0])), height), Image.Resampling.LANCZOS))
        for picture in pictures]
    return scaled[0] if len(scaled) == 1 else np.concatenate(scaled, axis=1)


def _fit(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """`text` in the built-in font's characters, truncated to `width` pixels."""
    spelled = text.encode("latin-1", "replace").decode("latin-1")[:200]
    while spelled and draw.textlength(spelled) > width:
        spelled = spelled[:-1]
    return spelled
