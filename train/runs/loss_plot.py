"""RUN/loss.png: the loss of the steps, and the validation loss. Drawn from the log, so a resumed run draws the same.

Steps are gathered in as many columns as the picture has: the band goes from the least to the largest loss of a column.
The line is a moving average over a fiftieth of the run.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from prep.pages.charts import ticks
from prep.runs.history import SMOOTH, Point, smoothed

WIDTH, HEIGHT, SCALE = 960, 480, 2  # pixels; drawn larger, since Pillow's lines are not antialiased
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 34, 36
PAPER, INK, SOFT, GRID = "#ffffff", "#1b1f24", "#565e68", "#e3e5e8"
BAND, LINE, HELD_OUT = "#c3d7ee", "#2f6db5", "#c2410c"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Where losses and steps are on the sheet."""

    steps: int
    low: float
    high: float

    def at(self, step: float, loss: float) -> tuple[float, float]:
        """The pixel of a point."""
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(self.steps, 1)
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (loss - self.low) / (self.high - self.low)
        return x * SCALE, y * SCALE


def loss_png(losses: Sequence[Point], validation: Sequence[Point], steps: int) -> bytes:
    """A PNG; `steps`: of the whole run. Without a point it has axes alone."""
    smooth = list(smoothed(losses, max(1.0, steps / SMOOTH)))
    seen = sorted(loss for _, loss in losses)
    middle = seen[len(seen) // 100 : len(seen) - len(seen) // 100]  # outliers would flatten the rest
    shown = [*middle, *(loss for _, loss in (*smooth, *validation))] or [0.0, 1.0]
    low, high = min(shown), max(shown)
    frame = _Frame(steps=steps, low=low - 0.05 * (high - low or 1), high=high + 0.05 * (high - low or 1))
    sheet = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12 * SCALE)
    _axes(pen, font, frame)
    for step, least, most in _columns(losses, frame):
        pen.line([frame.at(step, most), frame.at(step, least)], BAND, 2 * SCALE)
    pen.line([frame.at(*point) for point in smooth], LINE, 2 * SCALE, joint="curve")
    for point in validation:
        x, y = frame.at(*point)
        pen.ellipse([x - 4 * SCALE, y - 4 * SCALE, x + 4 * SCALE, y + 4 * SCALE], HELD_OUT)
    _legend(pen, font, bool(validation))
    out = io.BytesIO()
    sheet.reduce(SCALE).save(out, "PNG")
    return out.getvalue()


def _columns(losses: Sequence[Point], frame: _Frame) -> Iterator[tuple[int, float, float]]:
    """Step, least and largest loss of each column of pixels, within the frame."""
    columns: dict[int, tuple[int, float, float]] = {}
    for step, loss in losses:
        column, inside = int(frame.at(step, 0)[0]) // SCALE, min(max(loss, frame.low), frame.high)
        _, least, most = columns.get(column, (step, inside, inside))
        columns[column] = step, min(least, inside), max(most, inside)
    yield from columns.values()


def _axes(pen: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, frame: _Frame) -> None:
    for loss in ticks(frame.low, frame.high):
        pen.line([frame.at(0, loss), frame.at(frame.steps, loss)], GRID, SCALE)
        x, y = frame.at(0, loss)
        pen.text((x - 8 * SCALE, y), f"{loss:.4g}", SOFT, font, "rm")
    for step in ticks(0, max(frame.steps, 1)):
        x, y = frame.at(step, frame.low)
        pen.line([(x, y), (x, y + 4 * SCALE)], SOFT, SCALE)
        pen.text((x, y + 8 * SCALE), f"{step:g}", SOFT, font, "ma")
    pen.line([frame.at(0, frame.high), frame.at(0, frame.low), frame.at(frame.steps, frame.low)], SOFT, SCALE)


def _legend(pen: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, held_out: bool) -> None:
    x, y = LEFT * SCALE, TOP // 2 * SCALE
    for text, color in (("loss", BAND), ("smoothed", LINE), *((("validation", HELD_OUT),) if held_out else ())):
        pen.rectangle([x, y - 5 * SCALE, x + 10 * SCALE, y + 5 * SCALE], color)
        pen.text((x + 16 * SCALE, y), text, INK, font, "lm")
        x += 110 * SCALE
