"""The curve of a learning rate range test: which rate it suggests and why, and how it looks in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, log10
from statistics import fmean

LEAST = 5e-4  # a fall of the loss, in parts of it, below which a rate is not said to train anything
DIVERGED = 1.0  # a rise, likewise, at which the test stops
_HEIGHT = 7  # lines of a chart


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The loss after some steps, the last of which had this rate."""

    rate: float
    step: int
    loss: float
    change: float  # in parts of the loss of untouched weights on the same draws; below 0: it fell


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """What the curve says."""

    rate: float | None  # None: the loss did not fall
    steepest: float | None  # the rate at which the loss fell fastest by the logarithm of the rate
    lowest: float | None  # the rate at which the loss was lowest
    reason: str


def smoothed(points: Sequence[Point]) -> list[float]:
    """The change at each point, averaged with its neighbors'."""
    changes = [point.change for point in points]
    return [fmean(changes[max(number - 1, 0) : number + 2]) for number in range(len(changes))]


def suggest(points: Sequence[Point]) -> Suggestion:
    """The smaller one of two usual choices: the rate of steepest descent, and a tenth of that of the lowest loss.

    The slope is that between neighbors of a point, by the logarithm of the rate, before the lowest loss.
    """
    changes = smoothed(points)
    if len(points) < 3 or min(changes) > -LEAST:
        return Suggestion(rate=None, steepest=None, lowest=None,
                          reason="the loss fell at no rate: it may already be as low as these steps can make it, or "
                          "the weights that train cannot change it")
    bottom = changes.index(min(changes))
    logs = [log10(point.rate) for point in points]
    pairs = [(max(number - 1, 0), min(number + 1, bottom)) for number in range(bottom + 1)]
    slopes = [(changes[last] - changes[first]) / (logs[last] - logs[first]) if last > first else 0.0
              for first, last in pairs]
    steepest, lowest = points[slopes.index(min(slopes))].rate, points[bottom].rate
    still = bottom == len(points) - 1
    ended = "at the highest rate, where it still fell" if still else f"at {lowest:.1e}"
    if lowest / 10 <= steepest:
        return Suggestion(rate=lowest / 10, steepest=steepest, lowest=lowest,
                          reason=f"a tenth of the rate of the lowest loss, which was {ended}")
    return Suggestion(rate=steepest, steepest=steepest, lowest=lowest,
                      reason=f"the loss fell fastest there; it was lowest {ended}")


def chart(points: Sequence[Point]) -> list[str]:
    """Lines with a mark for each point: the change of the loss by the logarithm of the rate. A rise above the height
    of the deepest fall is cut off."""
    changes = [point.change if isfinite(point.change) else DIVERGED for point in points]
    low = min(*changes, -LEAST)
    high = min(max(*changes, 0.0), -low)
    rows = [round((min(change, high) - low) / (high - low) * (_HEIGHT - 1)) for change in changes]
    lines = []
    for row in range(_HEIGHT - 1, -1, -1):
        value = low + (high - low) * row / (_HEIGHT - 1)
        marks = "".join("*" if at == row else " " for at in rows).rstrip()
        lines.append(f"{value:+8.1%} |{marks}")
    first, last = (f"{point.rate:.0e}" for point in (points[0], points[-1]))
    lines.append(f"{'':8} +{'-' * len(points)}")
    lines.append(f"{'':10}{first}{last:>{max(len(points) - len(first), len(last) + 1)}}")
    return lines
