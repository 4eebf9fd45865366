"""Lays out charts of numbers over steps: lines, bands, dots and marks in an SVG, with a table for screen readers.

A band goes from the least to the largest value of each column of the chart, so a run of a million steps takes as many
bytes as one of a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prep.pages.parts import Column, Table

WIDTH, HEIGHT = 480, 232  # user units
LEFT, RIGHT, TOP, BOTTOM = 72, 12, 10, 28  # margins
COLUMNS = 200  # of a band
ROWS = 12  # of a chart's table
ACROSS = 6  # numbers below a chart

Point = tuple[float, float]  # x, y
# "line" to "fourth" are lines; the parts of a kind are classes of page.css
Kind = Literal["band", "line", "second", "third", "fourth", "dots", "dots second", "dots third"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Numbers to draw, in ascending order of x. A band shows their range, the other kinds each of them."""

    name: str
    kind: Kind
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The drawing of a series, in user units."""

    name: str
    kind: Kind
    path: str  # of an SVG path; "" for dots
    dots: tuple[Point, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A number of an axis."""

    at: float  # user units
    says: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart: `says` is for those who do not see it, and `table` has the numbers."""

    title: str
    says: str
    traces: tuple[Trace, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    marks: tuple[Tick, ...]  # vertical lines
    table: Table
    note: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def chart_of(title: str, series: Sequence[Series], *, axis: str, last: float, marks: Mapping[float, str] | None = None,
             zero: bool = False, note: str = "") -> Chart | None:
    """A chart from 0 to `last`; `None` without a point. `axis` names x; with `zero`, y begins at 0.

    The range of y leaves out the extreme hundredths of a band, which would flatten the rest.
    """
    drawn = [line for line in series if line.points]
    if not drawn:
        return None
    low, high = _range(drawn, zero)
    scale = _ChartScale(last=max(last, *(line.points[-1][0] for line in drawn), 1e-9), low=low, high=high)
    return Chart(
        title=title, says=_says(title, drawn, axis), note=note, traces=tuple(_trace(line, scale) for line in drawn),
        across=tuple(Tick(at=scale.x(x), says=_spelled(x)) for x in _few(ticks(0, scale.last))),
        up=tuple(Tick(at=scale.y(y), says=f"{y:.4g}") for y in ticks(low, high)),
        marks=tuple(Tick(at=scale.x(x), says=says) for x, says in sorted((marks or {}).items())),
        table=_table(title, drawn, axis))


def ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers from `low` to `high`."""
    power = 10.0 ** math.floor(math.log10(max(high - low, 1e-12)))
    step = next(power * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if (high - low) / (power * part) <= 8)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _few(numbers: Sequence[float]) -> list[float]:
    """Every number from 0 on, or every second one where their labels would touch."""
    return list(numbers[:: 1 if len(numbers) <= ACROSS else 2])


def columns_of(points: Iterable[Point], last: float, columns: int = COLUMNS) -> list[tuple[float, float, float, float]]:
    """x, least, mean and largest y of each column that has points, from left to right."""
    by_column: dict[int, list[float]] = {}
    for x, y in points:
        number = min(int(columns * x / max(last, 1e-9)), columns - 1)
        known = by_column.setdefault(number, [x, y, 0.0, y, 0])
        known[1], known[3] = min(known[1], y), max(known[3], y)
        known[2] += y
        known[4] += 1
    return [(x, least, total / count, most) for x, least, total, most, count in by_column.values()]


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChartScale:
    """The places of numbers in the chart."""

    last: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * value / self.last, 1)

    def y(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (inside - self.low) / (self.high - self.low), 1)


def _range(series: Sequence[Series], zero: bool) -> tuple[float, float]:
    shown: list[float] = [0.0] if zero else []
    for line in series:
        values = sorted(y for _, y in line.points)
        cut = len(values) // 100 if line.kind == "band" else 0
        shown += (values[cut], values[len(values) - 1 - cut])
    low, high = min(shown), max(shown)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (low if zero and low == 0 else low - room), high + room


def _trace(line: Series, scale: _ChartScale) -> Trace:
    if line.kind.startswith("dots"):
        dots = tuple((scale.x(x), scale.y(y)) for x, y in line.points)
        return Trace(name=line.name, kind=line.kind, dots=dots, path=_line(dots))
    columns = columns_of(line.points, scale.last)
    if line.kind == "band":
        upper = [(scale.x(x), scale.y(most)) for x, _, _, most in columns]
        lower = [(scale.x(x), scale.y(least)) for x, least, _, _ in reversed(columns)]
        return Trace(name=line.name, kind=line.kind, path=_line([*upper, *lower]) + "Z")
    few = len(line.points) <= 2 * COLUMNS
    return Trace(name=line.name, kind=line.kind, path=_line(
        [(scale.x(x), scale.y(y)) for x, y in line.points] if few
        else [(scale.x(x), scale.y(mean)) for x, _, mean, _ in columns]))


def _line(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points)


def _says(title: str, series: Sequence[Series], axis: str) -> str:
    """The chart in a sentence for each series."""
    parts = []
    for line in series:
        (first, begin), (last, end) = line.points[0], line.points[-1]
        values = [y for _, y in line.points]
        parts.append(f"{line.name}: {begin:.4g} at {axis} {_spelled(first)}, {end:.4g} at {axis} {_spelled(last)}, "
                     f"from {min(values):.4g} to {max(values):.4g}.")
    return f"{title}. " + " ".join(parts)


def _table(title: str, series: Sequence[Series], axis: str) -> Table:
    """The values of up to `ROWS` x, evenly spread; of dots each, as far as they fit."""
    dots = sorted({x for line in series if line.kind.startswith("dots") for x, _ in line.points})
    every = sorted({x for line in series for x, _ in line.points})
    wanted = dots if 2 <= len(dots) <= ROWS else _spread(every)
    known = [dict(line.points) for line in series]
    rows = tuple((_spelled(x), *(f"{values[x]:.5g}" if x in values else "" for values in known)) for x in wanted)
    return Table(caption=f"{title}: numbers", rows=rows, columns=(
        Column(head=axis, kind="number"), *(Column(head=line.name, kind="number") for line in series)))


def _spelled(x: float) -> str:
    return f"{int(x):,}" if x == int(x) else f"{x:,.4g}"


def _spread(values: Sequence[float]) -> list[float]:
    most = min(ROWS, len(values))
    return sorted({values[round(number * (len(values) - 1) / max(most - 1, 1))] for number in range(most)})
