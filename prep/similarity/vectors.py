"""Computes exact cosines of embeddings.

A product of two float16 numbers is a multiple of 2^-48, and so is every partial sum of a dot product, which the lengths
of both rows bound. Of rows of length 1, float64 holds each of these sums exactly: a dot product has one value, in
whatever order or blocks it is summed. Products in float32, twice as fast, only rule out pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prep.digest import digest_bytes

BLOCK = 1024  # pictures at a time; a tile of products of as many others takes 4 MiB
NUMBERS = 1 << 22  # of rows in float64 at a time, where pairs are measured: 32 MiB

Halves = np.ndarray[Any, np.dtype[np.float16]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vectors:
    """The embeddings of pictures, which are numbered in an order of their own. Rows may be mapped from a file."""

    rows: Halves  # [N, D]: of length 1, but for rounding
    order: Integers  # [N]: the row of each picture
    lengths: Doubles  # [N]: of each picture's row

    def __len__(self) -> int:
        return len(self.order)

    def of(self, pictures: Integers) -> Halves:
        """[P, D]: the rows of these pictures."""
        return self.rows[self.order[pictures]]

    def unit(self, pictures: Integers) -> Floats:
        """[P, D]: their rows, of length 1 to the precision of float32."""
        return (self.of(pictures) / self.lengths[pictures, None]).astype(np.float32)

    @property
    def slack(self) -> float:
        """More than a product of two rows of `unit` can differ from their cosine: D roundings of a sum of D products,
        and those of the rows (Higham, Accuracy and Stability of Numerical Algorithms, 3.1)."""
        return float(self.rows.shape[1] + 8) * 2.0**-24

    def cosines(self, first: Integers, second: Integers) -> Doubles:
        """[P]: the exact cosine of each pair."""
        step = max(NUMBERS // self.rows.shape[1], 1)
        dots = [np.einsum("ij,ij->i", self.of(first[low : low + step]).astype(np.float64),
                          self.of(second[low : low + step]).astype(np.float64))
                for low in range(0, len(first), step)]
        return np.concatenate([np.zeros(0), *dots]) / (self.lengths[first] * self.lengths[second])

    def tile(self, first: Integers, second: Integers) -> Doubles:
        """[P, Q]: the exact cosines of all these pictures with all those."""
        dots: Doubles = self.of(first).astype(np.float64) @ self.of(second).astype(np.float64).T
        return dots / (self.lengths[first, None] * self.lengths[None, second])

    def mean(self) -> float:
        """The mean cosine of two different pictures, 0 without two: the square of the rows' sum has all pairs. As
        exact as the rows' lengths are 1."""
        total, count = np.zeros(self.rows.shape[1]), len(self)
        for pictures in blocks_of(np.arange(count)):
            total += self.of(pictures).sum(axis=0, dtype=np.float64)
        squares = np.square(np.sort(self.lengths)).sum()
        return float((np.square(total).sum() - squares) / (count * (count - 1))) if count > 1 else 0.0

    def by_content(self) -> Integers:
        """[N]: the pictures in an order that depends on their rows alone, and is as good as random; equal ones as they
        are numbered."""
        digests = [digest_bytes(row.tobytes()) for pictures in blocks_of(np.arange(len(self)))
                   for row in self.of(pictures)]
        return np.array(sorted(range(len(self)), key=digests.__getitem__), np.int64)


def vectors_of(rows: Halves, order: Sequence[int] | Integers | None = None) -> Vectors:
    """The embeddings of pictures, [N, D] float16 of length 1; `order`: the row of each picture, if not as they are."""
    assert rows.ndim == 2 and rows.dtype == np.float16, f"{rows.dtype} {rows.shape}"
    places = np.arange(len(rows)) if order is None else np.asarray(order, np.int64)
    squares = [np.square(rows[part].astype(np.float64)).sum(axis=1) for part in blocks_of(places)]
    lengths = np.sqrt(np.concatenate([np.zeros(0), *squares]))
    assert bool((np.abs(lengths - 1) < 0.1).all()), "rows are not of length 1"
    return Vectors(rows=rows, order=places, lengths=lengths)


def blocks_of(pictures: Integers) -> Iterator[Integers]:
    """The pictures, `BLOCK` at a time."""
    return (pictures[low : low + BLOCK] for low in range(0, len(pictures), BLOCK))
