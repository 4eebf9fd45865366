"""Finds the pictures of a set that resemble none of the others: their nearest ones are far."""

from __future__ import annotations

import numpy as np

from prep.similarity.neighbors import Neighbors
from prep.similarity.vectors import Doubles, Integers

SIGMA = 1.4826  # the standard deviation of normal numbers, in units of their median absolute deviation


def closeness(found: Neighbors) -> Doubles:
    """[P]: the mean cosine of each picture with its neighbors; a mean of several, as the only two of a kind are near to
    each other (Ramaswamy et al., SIGMOD 2000, rank outliers by the distance of the k-th)."""
    real = found.others >= 0
    sums = np.where(real, found.cosines, 0).sum(axis=1)
    means: Doubles = sums / np.maximum(real.sum(axis=1), 1)
    return means


def outliers(values: Doubles, *, deviations: float, gap: float) -> tuple[Integers, float]:
    """(the pictures of low closeness, farthest first; the median of all).

    Low is `deviations` robust standard deviations below the median: 3.5 of them after Iglewicz and Hoaglin (How to
    Detect and Handle Outliers, 1993), who divide by the median absolute deviation, which outliers do not change. It is
    also `gap` below the median, so that a set of equal pictures, whose deviation is next to nothing, has none.
    """
    if not len(values):
        return np.zeros(0, np.int64), 0.0
    median = float(np.median(values))
    spread = SIGMA * float(np.median(np.abs(values - median)))
    low = np.flatnonzero(median - values > max(deviations * spread, gap))
    return low[np.argsort(values[low], kind="stable")], median
