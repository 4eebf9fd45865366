"""Lays out the bucket plot: picture sizes against buckets on logarithmic axes, as shapes for a page or a PNG.

On logarithmic axes an aspect ratio is a diagonal, and the distance between two diagonals grows with the difference in
log aspect ratio. The plot draws each bucket's diagonal: a picture goes to the nearest diagonal and is scaled along it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, log2, sqrt
from typing import ClassVar, Literal

from prep.geometry import Size

SIDE = 460  # of the plot, in user units
LEFT, TOP, RIGHT, BOTTOM = 58, 120, 22, 56  # margins
WIDTH, HEIGHT = LEFT + SIDE + RIGHT, TOP + SIDE + BOTTOM
HALF = 5  # of a bucket's square
DOTS = 2000  # distinct picture sizes drawn, the most frequent first; a page must stay small
NOTE = ("Each picture goes to the bucket with the nearest line, is scaled along that line, and is cropped to the "
        "bucket.")
TICK = 44  # minimum user units between the numbers of an axis
LABEL_WIDTH, LABEL_HEIGHT = 80, 17  # user units of a bucket's label


@dataclass(frozen=True, slots=True)
class Dot:
    """Pictures of one size."""

    kind: ClassVar = "dot"
    x: float
    y: float
    radius: float  # grows with the number of pictures
    says: str


@dataclass(frozen=True, slots=True)
class Square:
    """A bucket."""

    kind: ClassVar = "bucket"
    half: ClassVar = HALF
    x: float  # of its middle
    y: float
    says: str


@dataclass(frozen=True, slots=True)
class Line:
    """A grid line, the diagonal of square pictures, or the diagonal of a bucket."""

    kind: Literal["grid", "square", "aspect"]
    ends: tuple[float, float, float, float]  # x1 y1 x2 y2


@dataclass(frozen=True, slots=True)
class Label:
    """Text; `x` is its start, middle or end (see `anchor`), `y` its baseline."""

    kind: ClassVar = "label"
    x: float
    y: float
    anchor: Literal["start", "middle", "end"]
    words: str
    tone: Literal["tick", "axis", "legend", "name"]


Shape = Dot | Square | Line | Label


@dataclass(frozen=True, slots=True)
class Plot:
    """The shapes of a plot; empty without pictures or buckets."""

    shapes: Sequence[Shape]
    width: int = WIDTH
    height: int = HEIGHT


def bucket_shapes(pictures: Mapping[Size, int], buckets: Mapping[Size, int]) -> list[Shape]:
    """Returns the shapes from back to front: a line and a square per bucket, a dot per picture size, a legend.

    y points down. `pictures` and `buckets` count the pictures of each size and in each bucket.
    """
    if not pictures or not buckets:
        return []
    sides = [side for size in (*pictures, *buckets) for side in size]
    scale = _PixelScale(min(sides), max(sides))
    drawn = sorted(pictures.items(), key=lambda counted: (-counted[1], counted[0]))[:DOTS]
    most = max(pictures.values())
    dots = [Dot(scale.x(wide), scale.y(high), _radius(count, most),
                f"{count} {'picture' if count == 1 else 'pictures'} of {wide}x{high}")
            for (wide, high), count in drawn]
    squares = [Square(scale.x(wide), scale.y(high), f"bucket {wide}x{high}: {count} samples")
               for (wide, high), count in sorted(buckets.items())]
    names = [f"{wide}x{high}" for wide, high in sorted(buckets)]
    return [*scale.grid(), *(_aspect(square.x, square.y) for square in squares), *dots, *squares,
            *_names(squares, names, dots), *_legend(most)]


def _radius(count: int, most: int) -> float:
    """3 for one picture; the area beyond grows with the count, up to a radius of 11."""
    return round(3 + 8 * sqrt((count - 1) / max(most - 1, 9)), 1)


def _aspect(x: float, y: float) -> Line:
    """The diagonal through a bucket, across the plot: all sizes with its aspect ratio."""
    low, high = max(LEFT - x, y - TOP - SIDE), min(LEFT + SIDE - x, y - TOP)
    return Line("aspect", (round(x + low, 1), round(y - low, 1), round(x + high, 1), round(y - high, 1)))


def _names(squares: Sequence[Square], names: Sequence[str], dots: Sequence[Dot]) -> Iterator[Label]:
    """Labels each bucket with its size, left or right of its square, if there is free space."""
    places = [*((square.x, square.y, float(HALF)) for square in squares),
              *((dot.x, dot.y, dot.radius) for dot in dots)]
    taken = [(x - half, y - half, x + half, y + half) for x, y, half in places]
    for square, name in zip(squares, names, strict=True):
        left, right = square.x - HALF - 4, square.x + HALF + 4
        before = Label(round(left, 1), round(square.y + 4, 1), "end", name, "name"), left - LABEL_WIDTH
        behind = Label(round(right, 1), round(square.y + 4, 1), "start", name, "name"), right
        for label, x in (before, behind):
            box = x, square.y - LABEL_HEIGHT / 2, x + LABEL_WIDTH, square.y + LABEL_HEIGHT / 2
            if LEFT < x < LEFT + SIDE - LABEL_WIDTH and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                yield label
                break


def _overlap(box: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def _legend(most: int) -> Iterator[Shape]:
    """Explains dots, squares and lines, above the plot."""
    x, middle = LEFT + 13, LEFT + 13
    for count in sorted({1, max(1, isqrt(most)), most}):
        yield Dot(x, 20, _radius(count, most), "")
        yield Label(x + 15, 25, "start", f"{count:,}", "legend")
        x += 40 + 11 * len(f"{count:,}")
    yield Label(x - 8, 25, "start", "pictures of one size" if most > 1 else "picture of one size", "legend")
    yield Line("aspect", (middle - 10, 54, middle + 10, 34))
    yield Square(middle, 44, "")
    yield Label(LEFT + 36, 49, "start", "bucket, on the line of its aspect ratio", "legend")
    yield Line("square", (middle - 10, 78, middle + 10, 58))
    yield Label(LEFT + 36, 73, "start", "width = height", "legend")


class _PixelScale:
    """Converts pixels to user units: one logarithmic scale for widths (to the right) and heights (upwards)."""

    def __init__(self, least: int, most: int) -> None:
        self.low, self.high = log2(least) - 0.2, log2(most) + 0.2

    def x(self, width: float) -> float:
        """User units from the left."""
        return round(LEFT + SIDE * self._part(width), 1)

    def y(self, height: float) -> float:
        """User units from the top."""
        return round(TOP + SIDE * (1 - self._part(height)), 1)

    def _part(self, side: float) -> float:
        return (log2(side) - self.low) / (self.high - self.low)

    def grid(self) -> Iterator[Shape]:
        """Grid lines, tick labels, the diagonal of square sizes, and the names of the axes."""
        (left, right), (top, bottom) = (LEFT, LEFT + SIDE), (TOP, TOP + SIDE)
        for side in self.ticks():
            across, up = self.x(side), self.y(side)
            yield Line("grid", (across, top, across, bottom))
            yield Line("grid", (left, up, right, up))
            yield Label(across, bottom + 18, "middle", str(side), "tick")
            yield Label(left - 6, up + 4, "end", str(side), "tick")
        yield Line("square", (left, bottom, right, top))
        yield Label(right, bottom + 42, "end", "width of picture or bucket, in pixels", "axis")
        yield Label(6, top - 12, "start", "height, in pixels", "axis")

    def ticks(self) -> list[int]:
        """Returns the labeled sides: powers of two and the halves between, as many as fit."""
        octave = SIDE / (self.high - self.low)  # user units per doubling
        powers = range(int(self.high) + 1)
        if octave / 2 >= TICK:  # halves are 512, 768 (0.58 of a doubling), 1024
            sides = [side for power in powers for side in (1 << power, 3 << power >> 1) if side]
        else:
            every = next(step for step in range(1, 99) if step * octave >= TICK)
            sides = [1 << power for power in powers if power % every == 0]
        return sorted({side for side in sides if self.low < log2(side) < self.high})
