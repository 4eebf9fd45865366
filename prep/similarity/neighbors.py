"""Finds the nearest pictures of each picture, exactly, in bounded memory.

Every pair is compared once, a tile of `BLOCK` by `BLOCK` at a time, which takes some 60 MiB in all: 200,000 pictures of
768 numbers are 15 million million multiplications, ten minutes of a processor of 50 GFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prep.similarity.vectors import Doubles, Floats, Integers, Vectors, blocks_of

LIMIT = 200_000  # pictures that are all compared with one another
DENSE = 16  # a tile of which more than one pair in so many may be near is measured whole

Tick = Callable[[int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbors:
    """The nearest other pictures of some pictures: the nearest first, of equally near ones the lower number."""

    cosines: Doubles  # [P, K]; -inf: there are no more
    others: Integers  # [P, K]: numbers of pictures, -1: there are no more


def neighbors(vectors: Vectors, count: int, among: Integers | None = None, tick: Tick = lambda _: None) -> Neighbors:
    """The `count` nearest others of each picture; `among` (ascending): only of these pictures, among these.

    `tick` is called with the number of pictures after each block; blocks are equal work.
    """
    pictures = np.arange(len(vectors)) if among is None else among
    best = _Best(vectors, pictures, count)
    parts = list(blocks_of(np.arange(len(pictures))))
    for number, places in enumerate(parts):
        mine = vectors.unit(pictures[places])
        for step in range(len(parts) // 2 + 1):  # half of the blocks after it, in a circle
            if 2 * step == len(parts) and step and number >= step:
                continue  # which is compared from the other side
            others = parts[(number + step) % len(parts)]
            products = mine @ vectors.unit(pictures[others]).T
            if step == 0:
                np.fill_diagonal(products, -np.inf)
            best.offer(places, pictures[others], products)
            if step:
                best.offer(others, pictures[places], products.T)
        tick(len(places))
    return best.neighbors


def nearest(vectors: Vectors, pictures: Integers, others: Integers, count: int,
            tick: Tick = lambda _: None) -> Neighbors:
    """The `count` of `others` (ascending) that are nearest to each of `pictures`, which is not near to itself."""
    best = _Best(vectors, pictures, count)
    for places in blocks_of(np.arange(len(pictures))):
        mine = vectors.unit(pictures[places])
        for part in blocks_of(others):
            products = mine @ vectors.unit(part).T
            products[pictures[places, None] == part[None]] = -np.inf
            best.offer(places, part, products)
        tick(len(places))
    return best.neighbors


class _Best:
    """The best others of pictures so far, by their exact cosines."""

    def __init__(self, vectors: Vectors, pictures: Integers, count: int) -> None:
        self._vectors, self._pictures = vectors, pictures
        self.neighbors = Neighbors(cosines=np.full((len(pictures), count), -np.inf),
                                   others=np.full((len(pictures), count), -1, np.int64))

    def offer(self, places: Integers, others: Integers, products: Floats) -> None:
        """Takes in `others`, ascending, whose products with the pictures at these places are about these; -inf: a
        picture itself."""
        best, count = self.neighbors, self.neighbors.others.shape[1]
        bars = best.cosines[places, -1]
        empty = np.isneginf(bars)
        if count < len(others) and empty.any():
            bars[empty] = np.partition(products[empty], -count, axis=1)[:, -count] - self._vectors.slack
        near = products > (bars - self._vectors.slack).astype(np.float32)[:, None]
        if int(near.sum()) * DENSE > near.size and count < len(others):
            rows, columns, cosines = self._measured(places, others, products)
        else:
            rows, columns = np.nonzero(near)
            cosines = self._vectors.cosines(self._pictures[places[rows]], others[columns])
        self._merge(places, rows, others[columns], cosines)

    def _measured(self, places: Integers, others: Integers, products: Floats) -> tuple[Integers, Integers, Doubles]:
        """(row, column, exact cosine) of the best of each row: where very many are nearly the same."""
        exact = self._vectors.tile(self._pictures[places], others)
        exact[np.isneginf(products)] = -np.inf
        columns = np.argsort(-exact, axis=1, kind="stable")[:, : self.neighbors.others.shape[1]]
        cosines = np.take_along_axis(exact, columns, axis=1)
        rows = np.repeat(np.arange(len(places)), columns.shape[1])
        real = ~np.isneginf(cosines.reshape(-1))
        return rows[real], columns.reshape(-1)[real], cosines.reshape(-1)[real]

    def _merge(self, places: Integers, rows: Integers, others: Integers, cosines: Doubles) -> None:
        best, count = self.neighbors, self.neighbors.others.shape[1]
        touched, row = np.unique(rows, return_inverse=True)
        known = places[touched]
        every_row = np.concatenate([np.repeat(np.arange(len(touched)), count), row])
        every_cosine = np.concatenate([best.cosines[known].reshape(-1), cosines])
        every_other = np.concatenate([best.others[known].reshape(-1), others])
        order = np.lexsort((every_other, -every_cosine, every_row))
        counts = np.bincount(every_row, minlength=len(touched))
        position = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        kept = order[position < count]
        best.cosines[known] = every_cosine[kept].reshape(-1, count)
        best.others[known] = every_other[kept].reshape(-1, count)
