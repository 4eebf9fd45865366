"""Finds copies of whole pictures among very many, by a perceptual hash of 63 bytes: like pHash, with numbers for bits.

A signature is the low frequencies of a thumbnail's cosine transform without its mean, each times its frequency (the
spectrum of photographs falls with it), normalized to length 1. It is invariant to size, brightness and contrast, and
mirroring flips every other sign, so that one matrix product compares everything with everything. Likely pairs are then
measured on thumbnails (`prep.scan.duplicates.correlation.whole_correlation`). Cropped pictures are not found: that
takes sliding.

Measured on 63 real photos: 315 copies (resized to 30-100 %, JPEG of quality 30-95, half of them brightened) reach 0.92
or more with their originals, half of them 0.99; no two different photos more than 0.72, mirrored 0.80. Cost grows with
the square of the number of pictures: `make bench` measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from prep.scan.duplicates.correlation import FLAT, SIDE, Thumb

FREQUENCIES = 8  # each way
LENGTH = FREQUENCIES * FREQUENCIES - 1  # bytes of a signature
LIKELY = 0.9  # product of two signatures from which their thumbnails are compared
LIMIT = 200_000  # pictures; beyond, comparing all with all takes too long
BLOCK = 2048  # signatures compared with as many others at a time: 16 MiB of products

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two pictures that may be copies, by index."""

    first: int
    second: int  # the larger index
    mirrored: bool


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


def likely_pairs(signatures: Sequence[bytes], tick: Callable[[int], object] = lambda _: None) -> Iterator[Pair]:
    """For each picture, the most similar earlier picture, and the one most similar to its mirror image, if likely."""
    rows = _unit(signatures)
    turned = rows * _mirror()
    for start in range(0, len(rows), BLOCK):
        block = slice(start, min(start + BLOCK, len(rows)))
        for mirrored, those in ((False, rows), (True, turned)):
            scores, places = _best_earlier(those[block], rows, start)
            for offset in np.flatnonzero(scores >= LIKELY):
                yield Pair(first=int(places[offset]), second=start + int(offset), mirrored=mirrored)
        tick(block.stop - start)


def _best_earlier(those: Floats, rows: Floats, start: int) -> tuple[Floats, np.ndarray[Any, np.dtype[np.int64]]]:
    """(largest products with an earlier row, indices of that row) for `those`, the first of which has index `start`."""
    best = np.full(len(those), -1, np.float32)
    places = np.zeros(len(those), np.int64)
    for low in range(0, start + len(those), BLOCK):
        products = those @ rows[low : min(low + BLOCK, start + len(those))].T
        if low + products.shape[1] > start:  # excludes the row itself and later ones
            later = np.arange(low, low + products.shape[1])[None] >= np.arange(start, start + len(those))[:, None]
            products[later] = -1
        found = products.argmax(axis=1)
        scores = products[np.arange(len(those)), found]
        better = scores > best
        best[better], places[better] = scores[better], low + found[better]
    return best, places


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


def _mirror() -> Floats:
    """The signs by which mirroring a picture multiplies its signature: odd horizontal frequencies change sign."""
    signs = np.where(np.arange(FREQUENCIES) % 2, -1, 1)
    mirror: Floats = np.tile(signs, FREQUENCIES)[1:].astype(np.float32)
    return mirror
