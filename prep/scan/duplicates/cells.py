"""Finds likely copies among so many pictures that not all can be compared with all: each with those in cells near it.

The cells are those of spherical k-means, as many as the square root of the number of pictures, and a picture is in the
one whose center is nearest to its signature. It is compared with earlier pictures in the `PROBED` cells that are
nearest to it, and with those nearest to its mirror image. Random signatures are the hardest, since real ones lie closer
together: of random ones in 1,000 cells, 99.8 % of pairs whose product is 0.92 are compared, and all of those of 0.95 or
more (4,000 of each). Copies have 0.92 or more, half of them 0.99.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

PROBED = 32  # cells in which a picture, and its mirror image, is looked for
SAMPLE = 1 << 16  # signatures that the centers are computed from
ROUNDS = 4  # of k-means; more hardly change how even the cells are
AT_ONCE = 1 << 14  # signatures whose products with the centers are in memory

Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Cells:
    """Signatures in cells. `rows`: float32 [N, LENGTH], of length 1, or 0 for pictures that match no other."""

    def __init__(self, rows: Floats, flipped: Floats) -> None:
        """`flipped`, float32 [LENGTH], is 1 or -1: what mirroring a picture multiplies its signature by."""
        self._rows, self._flipped = rows, flipped
        some = np.flatnonzero(rows.any(axis=1))
        self._centers = _centers(rows[some[np.linspace(0, len(some) - 1, min(len(some), SAMPLE)).astype(np.int64)]],
                                 math.isqrt(len(some)))
        self._own = np.full(len(rows), -1, np.int32)
        for start in range(0, len(some), AT_ONCE):
            part = some[start : start + AT_ONCE]
            self._own[part] = (rows[part] @ self._centers.T).argmax(axis=1)

    def members(self, among: Integers) -> list[Integers]:
        """The pictures of each cell that are in `among`, which is sorted; so are they."""
        own = self._own[among]
        order = np.argsort(own, kind="stable")
        starts = np.searchsorted(own[order], np.arange(len(self._centers) + 1))
        return [among[order[low:high]] for low, high in pairwise(starts)]

    def find_better(self, members: list[Integers], those: Integers, best: Floats, earlier: Integers) -> None:
        """Notes in `best` and `earlier`, [2, N], for each of the pictures `those`, which are sorted, the largest
        product with an earlier one of `members`, plain and mirrored, that exceeds what is there."""
        those = those[self._own[those] >= 0]
        if not len(those):
            return
        for side in (0, 1):
            probes: Floats = self._rows[those] * self._flipped if side else self._rows[those]
            for cell, places in self._probed(probes):
                compared = members[cell][: np.searchsorted(members[cell], those[places[-1]])]
                if len(compared):
                    note_better(probes[places] @ self._rows[compared].T, those[places], compared, best[side],
                                 earlier[side])

    def _probed(self, probes: Floats) -> list[tuple[int, Integers]]:
        """The cells that are searched, each with the places, in order, of the probes that search it."""
        count = min(PROBED, len(self._centers))
        nearest = np.argpartition(probes @ self._centers.T, -count, axis=1)[:, -count:].reshape(-1)
        order = np.argsort(nearest, kind="stable")
        cells, starts = np.unique(nearest[order], return_index=True)
        return [(int(cell), part // count) for cell, part in zip(cells, np.split(order, starts[1:]), strict=True)]


def note_better(products: Floats, those: Integers, compared: Integers, best: Floats, earlier: Integers) -> None:
    """Of products [those, compared], notes the largest of each of `those` with an earlier picture, if it is better."""
    if compared[-1] >= those[0]:  # the picture itself and later ones
        products[compared[None] >= those[:, None]] = -1
    largest = products.argmax(axis=1)
    scores = products[np.arange(len(those)), largest]
    better = scores > best[those]
    best[those[better]], earlier[those[better]] = scores[better], compared[largest[better]]


def _centers(sample: Floats, count: int) -> Floats:
    """[count, LENGTH]: centers of length 1, by spherical k-means that begins with signatures of the sample."""
    centers = sample[np.linspace(0, len(sample) - 1, count).astype(np.int64)]
    for _ in range(ROUNDS):
        sums = np.zeros_like(centers)
        for start in range(0, len(sample), AT_ONCE):
            part = sample[start : start + AT_ONCE]
            np.add.at(sums, (part @ centers.T).argmax(axis=1), part)
        lengths = np.sqrt((sums * sums).sum(axis=1, keepdims=True))
        centers = np.where(lengths > 0, sums / np.maximum(lengths, 1e-6), centers)
    return centers
