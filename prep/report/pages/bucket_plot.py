"""The bucket plot: picture sizes against buckets, both axes logarithmic, as shapes and as inline SVG.

On logarithmic axes one aspect ratio is one diagonal, and the bucket nearest in log aspect ratio is nearest here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log2, sqrt
from typing import Literal

from prep.geometry import Size

SIDE = 460  # of the plot, in user units
MARGIN = 44
WHOLE = SIDE + 2 * MARGIN  # width and height with the margins
HALF = 5  # of a bucket's square
DOTS = 2000  # distinct picture sizes drawn, the most frequent first; a page must stay small


@dataclass(frozen=True, slots=True)
class Dot:
    """Pictures of one size."""

    x: float
    y: float
    radius: float  # area: how many pictures
    says: str


@dataclass(frozen=True, slots=True)
class Square:
    """A bucket."""

    x: float  # of its middle
    y: float
    says: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the grid, or the diagonal of all squares."""

    kind: Literal["grid", "square"]
    ends: tuple[float, float, float, float]  # x1 y1 x2 y2


@dataclass(frozen=True, slots=True)
class Label:
    """Words; `x` is where they start, end, or have their middle, `y` their base line."""

    x: float
    y: float
    anchor: Literal["start", "middle", "end"]
    words: str


Shape = Dot | Square | Line | Label


def bucket_shapes(pictures: Mapping[Size, int], buckets: Mapping[Size, int]) -> list[Shape]:
    """What is drawn, from back to front: a dot for each picture size, a square for each bucket; y points down."""
    if not pictures or not buckets:
        return []
    sides = [side for size in (*pictures, *buckets) for side in size]
    scale = _Scale(min(sides), max(sides))
    drawn = sorted(pictures.items(), key=lambda one: (-one[1], one[0]))[:DOTS]
    most = max(pictures.values())
    dots = (Dot(scale.x(wide), scale.y(high), 2 + 7 * sqrt(count / most), f"{count} pictures of {wide}x{high}")
            for (wide, high), count in drawn)
    squares = (Square(scale.x(wide), scale.y(high), f"bucket {wide}x{high}: {count} samples")
               for (wide, high), count in sorted(buckets.items()))
    return [*scale.grid(), *dots, *squares]


def bucket_plot(pictures: Mapping[Size, int], buckets: Mapping[Size, int]) -> str:
    """An `<svg>` in the page's own colors, with titles to hover over; nothing where there is nothing to show."""
    body = "\n".join(_as_svg(shape) for shape in bucket_shapes(pictures, buckets))
    return (f'<svg class="plot" viewBox="0 0 {WHOLE} {WHOLE}" role="img" '
            f'aria-label="picture sizes and buckets">\n{body}\n</svg>') if body else ""


def _as_svg(shape: Shape) -> str:
    match shape:
        case Dot(x, y, radius, says):
            return f'<circle class="picture" cx="{x}" cy="{y}" r="{radius:.1f}"><title>{says}</title></circle>'
        case Square(x, y, says):
            return (f'<rect class="bucket" x="{x - HALF:.1f}" y="{y - HALF:.1f}" width="{2 * HALF}" '
                    f'height="{2 * HALF}"><title>{says}</title></rect>')
        case Line(kind, (x1, y1, x2, y2)):
            return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'
        case Label(x, y, anchor, words):
            return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


class _Scale:
    """Pixels to user units: the same logarithmic scale for widths, to the right, and heights, upwards."""

    def __init__(self, least: int, most: int) -> None:
        self.low, self.high = log2(least) - 0.2, log2(most) + 0.2

    def x(self, width: int) -> float:
        """User units from the left."""
        return round(MARGIN + SIDE * (log2(width) - self.low) / (self.high - self.low), 1)

    def y(self, height: int) -> float:
        """User units from the top."""
        return round(WHOLE - self.x(height), 1)

    def grid(self) -> Iterator[Shape]:
        """Lines and numbers at powers of two, the square's diagonal, and the axes' names."""
        low, high = MARGIN, MARGIN + SIDE
        yield Line("square", (low, high, high, low))
        yield Label(high, high + 36, "end", "width in pixels")
        yield Label(4, low - 14, "start", "height in pixels")
        for power in range(int(self.low) + 1, int(self.high) + 1):
            across, up = self.x(1 << power), self.y(1 << power)
            yield Line("grid", (across, low, across, high))
            yield Line("grid", (low, up, high, up))
            yield Label(across, high + 18, "middle", str(1 << power))
            yield Label(low - 6, up + 4, "end", str(1 << power))
