"""Finds copies of whole pictures among very many, by a perceptual hash of 63 bytes: like pHash, with numbers for bits.

A signature is the low frequencies of a thumbnail's cosine transform without its mean, each times its frequency (the
spectrum of photographs falls with it), normalized to length 1. It is invariant to size, brightness and contrast.
Mirroring flips the signs of odd horizontal frequencies: two matrix products, of the even and of the odd ones, compare
everything with everything by their sum, and with mirror images by their difference. Likely pairs are then measured on
thumbnails (`prep.scan.duplicates.correlation.whole_correlation`). Cropped pictures are not found: that takes sliding.

Measured on 63 real photos: 315 copies (resized to 30-100 %, JPEG of quality 30-95, half of them brightened) reach 0.92
or more with their originals, half of them 0.99; no two different photos more than 0.72, mirrored 0.80. Cost grows with
the square of the number of pictures up to `DIRECT` of them, and with its power of 1.5 beyond, where a picture is
compared with those in cells near it (`prep.scan.duplicates.cells`): `make bench` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from prep.scan.duplicates.cells import Cells, note_better
from prep.scan.duplicates.correlation import FLAT, SIDE, Thumb

FREQUENCIES = 8  # each way
LENGTH = FREQUENCIES * FREQUENCIES - 1  # bytes of a signature
LIKELY = 0.9  # product of two signatures from which their thumbnails are compared
DIRECT = 200_000  # pictures that are all compared with all, which takes some five minutes of a processor
LIMIT = 1_000_000  # pictures
BLOCK = 2048  # pictures after which pairs are handed on
TILE = 512  # signatures compared with as many others at a time: 1 MiB of products, which a cache holds

Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two pictures that may be copies, by index."""

    first: int
    second: int  # the larger index
    mirrored: bool
    product: float  # of their signatures


def signature_of(thumb: Thumb) -> bytes:
    """`LENGTH` bytes, one signed number each; b"" for a picture without contrast, which matches no other."""
    gray_HW = thumb.across.astype(np.float32)
    gray_HW -= gray_HW.mean()
    if float(gray_HW.std()) < FLAT:
        return b""
    whole_UV = (_cosines(SIDE) @ gray_HW @ _cosines(gray_HW.shape[1]).T).astype(np.float32)
    low = (whole_UV * _weights()).reshape(-1)[1:]
    most = float(np.abs(low).max())
    return bytes(np.rint(low * (127 / most)).astype(np.int8)) if most >= FLAT else b""  # b"": only fine patterns


def likely_blocks(signatures: Sequence[bytes], tick: Callable[[int], object] = lambda _: None,
                  known: Sequence[Pair] = (), fresh: Collection[int] | None = None) -> Iterator[list[Pair]]:
    """For each picture, the most similar earlier picture, and the one most similar to its mirror image, if likely: a
    list for each `BLOCK` pictures, in their order.

    `fresh`: the pictures that were not compared before (default: all); the others are compared with them only, and
    `known` are the pairs of these others. Where these are more pairs than those of `DIRECT` pictures, each picture is
    compared with those in cells near it.
    """
    rows = _unit(signatures)
    every = np.arange(len(rows))
    new = every if fresh is None else np.array(sorted(fresh), np.int64)
    is_new = np.zeros(len(rows), bool)
    is_new[new] = True
    best = np.full((2, len(rows)), -1, np.float32)  # plain and mirrored: the largest product with an earlier picture
    earlier = np.zeros((2, len(rows)), np.int64)  # which that is
    for pair in known:
        best[int(pair.mirrored), pair.second], earlier[int(pair.mirrored), pair.second] = pair.product, pair.first
    find_better = _searches(rows, every, new)
    for start in range(0, len(rows), BLOCK):
        places = every[start : start + BLOCK]
        for those, find in zip((places[is_new[places]], places[~is_new[places]]), find_better, strict=True):
            find(those, best, earlier)
        yield [Pair(first=int(earlier[side, second]), second=second, mirrored=bool(side),
                    product=float(best[side, second]))
               for side in (0, 1) for second in places[best[side, places] >= LIKELY].tolist()]
        tick(len(places))


def _searches(rows: Floats, every: Integers, new: Integers) -> list[Callable[[Integers, Floats, Integers], None]]:
    """What compares pictures with earlier ones of `every`, and with those of `new`."""
    even = _is_even()
    if len(new) * len(every) <= DIRECT**2:
        halves = rows[:, even], rows[:, ~even]
        return [partial(_find_better, halves, others) for others in (every, new)]
    cells = Cells(rows, np.where(even, 1, -1).astype(np.float32))
    return [partial(cells.find_better, cells.members(others)) for others in (every, new)]


def _find_better(halves: tuple[Floats, Floats], others: Integers, those: Integers, best: Floats,
                 earlier: Integers) -> None:
    """Notes in `best` and `earlier`, for each of the pictures `those`, the largest product with an earlier one of
    `others`, plain and mirrored, that exceeds what is there. Both lists of indices are sorted."""
    for start in range(0, len(those), TILE):
        tile = those[start : start + TILE]
        probes = [half[tile] for half in halves]
        before = others[: np.searchsorted(others, tile[-1])]
        for low in range(0, len(before), TILE):
            compared = before[low : low + TILE]
            even, odd = (probe @ half[compared].T for probe, half in zip(probes, halves, strict=True))
            for side, products in enumerate((even + odd, even - odd)):
                note_better(products, tile, compared, best[side], earlier[side])


def _unit(signatures: Sequence[bytes]) -> Floats:
    """[N, LENGTH]: rows of length 1; zeros for pictures without a signature."""
    rows = np.zeros((len(signatures), LENGTH), np.float32)
    for row, signature in zip(rows, signatures, strict=True):
        if len(signature) == LENGTH:
            row[:] = np.frombuffer(signature, np.int8)
    rows /= np.maximum(np.sqrt((rows * rows).sum(axis=1, keepdims=True)), 1e-6)
    return rows


@lru_cache(maxsize=512)
def _cosines(length: int) -> Floats:
    """[FREQUENCIES, length]: the first rows of the orthonormal DCT-II, except for the factor of the mean's row."""
    places, frequencies = np.arange(length)[None], np.arange(FREQUENCIES)[:, None]
    cosines: Floats = np.cos(np.pi * (2 * places + 1) * frequencies / (2 * length)).astype(np.float32)
    return cosines * np.float32(np.sqrt(2 / length))


@lru_cache(maxsize=1)
def _weights() -> Floats:
    down, across = np.mgrid[:FREQUENCIES, :FREQUENCIES]
    weights: Floats = np.sqrt(down * down + across * across).astype(np.float32)
    return weights


def _is_even() -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[LENGTH]: whether the horizontal frequency of a number of a signature is even: mirroring keeps its sign."""
    even: np.ndarray[Any, np.dtype[np.bool_]] = np.arange(1, LENGTH + 1) % FREQUENCIES % 2 == 0
    return even
