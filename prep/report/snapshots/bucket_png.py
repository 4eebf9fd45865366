"""Draws the bucket plot as a PNG, for `prep bucket --png`."""

from __future__ import annotations

import io
from collections.abc import Mapping

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from prep.geometry import Size
from prep.pages.bucket_plot import HALF, HEIGHT, WIDTH, Dot, Label, Line, Shape, Square, bucket_shapes

MARK = b"tEXtSoftware\0Latentry"  # identifies our plots, which may be replaced
UNIT = 2  # pixels per user unit
SMOOTH = 2  # supersampling factor: Pillow's lines are not antialiased
LETTERS = 13  # user units
# The light colors of page.css; the paper is opaque, so that the plot is readable on a dark page too.
PAPER, INK, SOFT, DOT, BUCKET = "#ffffff", "#1b1f24", "#565e68", (47, 109, 181, 110), "#c2410c"
LINES = {"grid": (27, 31, 36, 28), "square": (27, 31, 36, 90), "aspect": (194, 65, 12, 80)}
DASH = 5  # user units of a dash, and of the gap after it
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # Pillow's: left, middle, right; s is the baseline


def bucket_png(pictures: Mapping[Size, int], buckets: Mapping[Size, int]) -> bytes:
    """Returns a PNG file; it is blank without pictures or buckets."""
    scale = UNIT * SMOOTH
    sheet = Image.new("RGB", (WIDTH * scale, HEIGHT * scale), PAPER)
    pen = ImageDraw.Draw(sheet, "RGBA")  # RGBA: dots are translucent
    font = ImageFont.load_default(LETTERS * scale)
    for shape in bucket_shapes(pictures, buckets):
        _draw(pen, font, shape, scale)
    notes, out = PngInfo(), io.BytesIO()
    notes.add_text("Software", "Latentry")
    sheet.reduce(SMOOTH).save(out, "PNG", pnginfo=notes)
    return out.getvalue()


def _draw(pen: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, shape: Shape,
          scale: int) -> None:
    match shape:
        case Dot(x, y, radius, _):
            pen.circle((x * scale, y * scale), radius * scale, fill=DOT)
        case Square(x, y, _):
            ends = [(x - HALF) * scale, (y - HALF) * scale, (x + HALF) * scale, (y + HALF) * scale]
            pen.rectangle(ends, fill=PAPER, outline=BUCKET, width=2 * scale)
        case Line(kind, ends):
            for part in _dashes(ends) if kind == "square" else (ends,):
                pen.line([end * scale for end in part], fill=LINES[kind], width=scale)
        case Label(x, y, anchor, words, tone):
            color = INK if tone in ("axis", "legend") else SOFT
            pen.text((x * scale, y * scale), words, fill=color, font=font, anchor=_ANCHORS[anchor],
                     stroke_width=2 * SMOOTH, stroke_fill=PAPER)  # keeps lines clear of the letters


def _dashes(ends: tuple[float, float, float, float]) -> list[tuple[float, float, float, float]]:
    """The dashes of a line."""
    x1, y1, x2, y2 = ends
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1)
    cuts = [min(start / length, 1.0) for start in range(0, int(length) + 2 * DASH, DASH)]
    places = [(x1 + (x2 - x1) * cut, y1 + (y2 - y1) * cut) for cut in cuts]
    return [(*start, *end) for start, end in zip(places[::2], places[1::2], strict=False)]
