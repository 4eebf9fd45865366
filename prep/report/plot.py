"""The bucket plot: picture sizes against buckets, both axes logarithmic, as inline SVG in the page's own colours."""

from __future__ import annotations

from collections.abc import Mapping
from math import log2, sqrt

from prep.records import Size

SIDE = 460  # of the plot, in user units; the page scales it
MARGIN = 44
DOTS = 2000  # distinct picture sizes drawn, the most frequent first; a page must stay small


def bucket_plot(pictures: Mapping[Size, int], buckets: Mapping[Size, int]) -> str:
    """An `<svg>`: a dot for each picture size (area: how many), a square for each bucket, titles to hover over.

    On logarithmic axes one aspect ratio is one diagonal, and the bucket nearest in log aspect ratio is nearest here.
    """
    if not pictures or not buckets:
        return ""
    sides = [side for size in (*pictures, *buckets) for side in size]
    scale = _Scale(min(sides), max(sides))
    drawn = sorted(pictures.items(), key=lambda one: (-one[1], one[0]))[:DOTS]
    most = max(pictures.values())
    dots = [_dot(scale, size, count, 2 + 7 * sqrt(count / most)) for size, count in drawn]
    squares = [_square(scale, size, count) for size, count in sorted(buckets.items())]
    body = "\n".join([*scale.grid(), *dots, *squares])
    return (f'<svg class="plot" viewBox="0 0 {SIDE + 2 * MARGIN} {SIDE + 2 * MARGIN}" role="img" '
            f'aria-label="picture sizes and buckets">\n{body}\n</svg>')


def _dot(scale: _Scale, size: Size, count: int, radius: float) -> str:
    return (f'<circle class="picture" cx="{scale.x(size[0])}" cy="{scale.y(size[1])}" r="{radius:.1f}">'
            f"<title>{count} pictures of {size[0]}x{size[1]}</title></circle>")


def _square(scale: _Scale, size: Size, count: int) -> str:
    left, top = scale.x(size[0]) - 5, scale.y(size[1]) - 5
    return (f'<rect class="bucket" x="{left:.1f}" y="{top:.1f}" width="10" height="10">'
            f"<title>bucket {size[0]}x{size[1]}: {count} samples</title></rect>")


class _Scale:
    """Pixels to user units: the same logarithmic scale for widths, to the right, and heights, upwards."""

    def __init__(self, least: int, most: int) -> None:
        self.low, self.high = log2(least) - 0.2, log2(most) + 0.2

    def x(self, width: int) -> float:
        """User units from the left."""
        return round(MARGIN + SIDE * (log2(width) - self.low) / (self.high - self.low), 1)

    def y(self, height: int) -> float:
        """User units from the top."""
        return round(2 * MARGIN + SIDE - self.x(height), 1)

    def grid(self) -> list[str]:
        """Lines and numbers at powers of two, the square's diagonal, and the axes' names."""
        ends = (MARGIN, MARGIN + SIDE)
        parts = [f'<line class="square" x1="{ends[0]}" y1="{ends[1]}" x2="{ends[1]}" y2="{ends[0]}"/>',
                 f'<text x="{ends[1]}" y="{ends[1] + 36}" text-anchor="end">width in pixels</text>',
                 f'<text x="4" y="{ends[0] - 14}">height in pixels</text>']
        for power in range(int(self.low) + 1, int(self.high) + 1):
            across, up = self.x(1 << power), self.y(1 << power)
            parts += [f'<line class="grid" x1="{across}" y1="{ends[0]}" x2="{across}" y2="{ends[1]}"/>',
                      f'<line class="grid" x1="{ends[0]}" y1="{up}" x2="{ends[1]}" y2="{up}"/>',
                      f'<text x="{across}" y="{ends[1] + 18}" text-anchor="middle">{1 << power}</text>',
                      f'<text x="{ends[0] - 6}" y="{up + 4}" text-anchor="end">{1 << power}</text>']
        return parts
