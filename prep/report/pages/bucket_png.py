"""`prep bucket --png`: the plot of the pictures' sizes against the buckets as a picture of its own."""

from __future__ import annotations

import io
from collections.abc import Mapping

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from prep.geometry import Size
from prep.report.pages.bucket_plot import HALF, WHOLE, Dot, Label, Line, Shape, Square, bucket_shapes

MARK = b"tEXtSoftware\0Latentry"  # by which a plot of ours is known, and may be replaced
UNIT = 2  # pixels of a user unit
SMOOTH = 2  # drawn so many times as large, and scaled down: Pillow's lines have hard edges
LETTERS = 12  # user units
PAPER, SOFT, GRID, DOT, BUCKET = "#fcfcfa", "#6b7178", "#d9dcdf", (59, 110, 168, 90), "#c4402f"  # page.css, light
_LEGEND: tuple[Shape, ...] = (
    Dot(250, 26, 5, ""), Label(260, 30, "start", "pictures of one size"), Square(404, 26, ""),
    Label(415, 30, "start", "a bucket"))
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # Pillow's: left, middle, right; s is the base line


def bucket_png(pictures: Mapping[Size, int], buckets: Mapping[Size, int]) -> bytes:
    """The bytes of a PNG file; nothing is in it where there are no pictures or no buckets."""
    scale = UNIT * SMOOTH
    sheet = Image.new("RGB", (WHOLE * scale, WHOLE * scale), PAPER)
    pen = ImageDraw.Draw(sheet, "RGBA")  # RGBA: dots show what is below them
    font = ImageFont.load_default(LETTERS * scale)
    for shape in (*bucket_shapes(pictures, buckets), *_LEGEND):
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
            pen.rectangle(ends, outline=BUCKET, width=2 * scale)
        case Line(_, ends):
            pen.line([end * scale for end in ends], fill=GRID, width=scale)
        case Label(x, y, anchor, words):
            pen.text((x * scale, y * scale), words, fill=SOFT, font=font, anchor=_ANCHORS[anchor])
