"""Finds copies of one photo: cropped, resized, brightened or mirrored, by correlating small gray thumbnails.

Each picture is kept at a height of 64 (sliding left and right over another finds crops at the sides) and at a width of
64 (the same up and down). The middle of each is compared with every place of every other by normalized correlation,
which is invariant to brightness and contrast; a place that fits is then measured over the whole overlap.

Measured on 63 real photos of 12 subjects: the two pairs that were cropped from one photo reach 0.99 and 0.996, the
nearest other pair 0.76; a copy at 75 % 0.998; a copy zoomed by 5 % on both axes 0.90, which is not found. Cost grows
with the square of the number of pictures: about 1 s for 1,000 and 90 s for 10,000 on one core.

`FEW` coefficients of each patch, not all its pixels, rule out most places, and lose nothing: in an orthonormal basis,
the correlation of two patches is at most the dot product of their first coefficients plus the product of the lengths of
their remainders. The basis is the probes' own largest components.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SIDE = 64  # pixels of the shared side of a thumbnail
LONG = 4 * SIDE  # the other side is cropped to this; no bucket is longer than 4:1
PROBE = SIDE // 8  # length of the probe along the other side, at half size: the short side of a 4:1 picture
FEW = 32  # coefficients, of a probe's 256
AT_ONCE = 1 << 22  # correlations in memory
PLACES = SIDE // 2  # of a probe in a square picture, about
ROUNDING = 1e-3  # of correlations in float32
LIKELY = 0.85  # correlation of the probe from which a place is measured in full
CLOSE = 0.75  # correlation there from which neighboring places are measured too: a probe is exact to a few pixels
SAME = 0.93  # correlation over the overlap from which two pictures are near-duplicates
SHARED = 0.5  # minimum overlap, as a fraction of the shorter thumbnail
FLAT = 2.0  # levels of 255: with less contrast, only noise would be compared
STRETCH = 0.04  # of the longer thumbnail: tolerance for equal aspect ratios, as small copies are rounded
LIMIT = 10_000  # pictures; beyond, comparing all with all takes too long

Gray = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thumb:
    """A picture in small, twice; comparisons slide along the last axis of each."""

    across: Gray  # [SIDE, any]: its height is SIDE
    down: Gray  # [SIDE, any]: its width is SIDE, transposed


@dataclass(frozen=True, kw_only=True, slots=True)
class Near:
    """Two near-duplicates by index, and how alike they are."""

    first: int
    second: int
    score: float  # correlation over the overlap, at most 1
    mirrored: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """All thumbnails of one orientation (across or down), and the data to search them."""

    grays: Sequence[Gray]
    halves: Sequence[Floats]
    probes: Floats  # [2N, SIDE/2 · PROBE], normalized: the middles, then the middles of the mirror images
    basis: Floats  # [SIDE/2 · PROBE, FEW], orthonormal
    few: Floats  # [2N, FEW + 1]: the probes in that basis, and the length of the remainder
    mirror: int  # the axis along which a mirror image is flipped


def near_duplicates(thumbs: Sequence[Thumb], tick: Callable[[int], object] = lambda _: None,
                    fresh: Collection[int] | None = None) -> tuple[Near, ...]:
    """All pairs of pictures of one photo, each once with its best score, in the order of indices.

    `fresh`: only pairs with one of these pictures (default: all).
    """
    count = len(thumbs)
    new = range(count) if fresh is None else sorted(fresh)
    old = [] if fresh is None else [index for index in range(count) if index not in fresh]
    best: dict[tuple[int, int], Near] = {}
    ways = _way([thumb.across for thumb in thumbs], 1), _way([thumb.down for thumb in thumbs], 0)
    for indices, probes in ((new, range(count)), (old, new)):
        rows = np.array([*probes, *(count + index for index in probes)], np.int64)
        for block in _blocks(indices, len(rows)):
            for near in (near for way in ways for near in _search(way, block, rows)):
                pair = near.first, near.second
                if pair not in best or best[pair].score < near.score:
                    best[pair] = near
            tick(len(block))
    return tuple(best[pair] for pair in sorted(best))


def whole_correlation(first: Thumb, second: Thumb, *, mirrored: bool) -> float:
    """The correlation of two whole pictures laid over each other; 0 if their aspect ratios differ."""
    moving, fixed = first.across, second.across
    wider = abs(moving.shape[1] - fixed.shape[1])
    if wider > max(STRETCH * max(moving.shape[1], fixed.shape[1]), 2):
        return 0.0
    moving = np.flip(moving, axis=1) if mirrored else moving
    return max(_correlation(moving, fixed, offset) for offset in range(-wider - 1, wider + 2))


def _blocks(indices: Sequence[int], rows: int) -> Iterator[Sequence[int]]:
    """`indices` in blocks; a block is compared with this many rows at once."""
    size = max(AT_ONCE // (rows * PLACES), 1) if rows else 1
    for start in range(0, len(indices) if rows else 0, size):
        yield indices[start : start + size]


def _way(grays: Sequence[Gray], mirror: int) -> _Axis:
    halves = [_half(gray) for gray in grays]
    middles = [_middle(half) for half in halves]
    middles += [np.flip(middle, axis=mirror) for middle in middles]
    probes = (_normalized(np.stack([middle.reshape(-1) for middle in middles])) if middles
              else np.zeros((0, SIDE // 2 * PROBE), np.float32))
    _, directions = np.linalg.eigh(probes.T @ probes)
    basis = np.ascontiguousarray(directions[:, -FEW:]).astype(np.float32)
    return _Axis(grays=grays, halves=halves, probes=probes, basis=basis, few=_in_few(probes, basis), mirror=mirror)


def _in_few(rows: Floats, basis: Floats) -> Floats:
    """[any, FEW + 1]: rows (each of length 1 or 0) in the basis, then the length of the remainder."""
    first = rows @ basis
    remainder = (rows * rows).sum(axis=1) - (first * first).sum(axis=1)
    few: Floats = np.concatenate([first, np.sqrt(np.maximum(remainder, 0))[:, None]], axis=1)
    return few


def _half(gray: Gray) -> Floats:
    """`gray` at half its size."""
    even = gray[:, : gray.shape[1] // 2 * 2].astype(np.float32)
    half: Floats = even.reshape(SIDE // 2, 2, -1, 2).mean(axis=(1, 3), dtype=np.float32)
    return half


def _start(half: Floats) -> int:
    return max(int(half.shape[1]) - PROBE, 0) // 2


def _middle(half: Floats) -> Floats:
    """[SIDE/2, PROBE]: the middle; flat, so that it matches nothing, if the thumbnail is too narrow."""
    if half.shape[1] < PROBE:
        return np.zeros((SIDE // 2, PROBE), np.float32)
    return half[:, _start(half) : _start(half) + PROBE]


def _normalized(rows: Floats) -> Floats:
    """Each row with mean 0 and length 1; zeros for a flat row."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    spread = np.sqrt((centred * centred).sum(axis=1, keepdims=True))
    flat = spread < FLAT * np.sqrt(rows.shape[1])
    normalized: Floats = np.where(flat, 0, centred / np.maximum(spread, 1e-6)).astype(np.float32)
    return normalized


def _search(way: _Axis, indices: Sequence[int], probes: Integers) -> Iterator[Near]:
    """Near-duplicates: pictures whose middle, one of these probes, occurs in one of the pictures `indices`."""
    windows = [_windows(way.halves[index]) for index in indices]
    starts = np.cumsum([0, *map(len, windows)])
    places = np.concatenate(windows)
    if not len(places):
        return
    numbers, columns = np.nonzero(way.few[probes] @ _in_few(places, way.basis).T >= LIKELY - ROUNDING)
    rows = probes[numbers]
    scores = np.einsum("ij,ij->i", way.probes[rows], places[columns])
    likely = scores >= LIKELY
    best: dict[tuple[int, int], tuple[float, int]] = {}  # probe and picture → the best place
    for row, column, score in zip(rows[likely], columns[likely], scores[likely], strict=True):
        where = int(np.searchsorted(starts, column, "right")) - 1
        pair, place = (int(row), where), int(column - starts[where])
        if pair not in best or best[pair] < (score, -place):
            best[pair] = score, -place
    for (row, where), (_, place) in sorted(best.items()):
        other, mirrored, index = row % len(way.grays), row >= len(way.grays), indices[where]
        if other == index:
            continue
        score = _measure(way, other, index, mirrored=mirrored, place=-place)
        if score >= SAME:
            yield Near(first=min(other, index), second=max(other, index), score=score, mirrored=mirrored)


def _windows(half: Floats) -> Floats:
    """[place, SIDE/2 · PROBE]: all patches of a probe's size, normalized; none if the thumbnail is too narrow."""
    if half.shape[1] < PROBE:
        return np.zeros((0, SIDE // 2 * PROBE), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(half, PROBE, axis=1)  # [SIDE/2, places, PROBE]
    return _normalized(windows.transpose(1, 0, 2).reshape(windows.shape[1], -1))


def _measure(way: _Axis, other: int, index: int, *, mirrored: bool, place: int) -> float:
    """The best correlation of `other` over `index`, with its middle at `place` (half size) or a few pixels away."""
    moving, fixed, half = way.grays[other], way.grays[index], way.halves[other]
    start = _start(half)
    if mirrored:
        moving = np.flip(moving, axis=way.mirror)
        start = half.shape[1] - PROBE - start if way.mirror == 1 else start
    around = 2 * (place - start)
    score = _correlation(moving, fixed, around)
    if score < CLOSE:
        return score
    return max(_correlation(moving, fixed, around + step) for step in range(-3, 4))


def _correlation(moving: Gray, fixed: Gray, offset: int) -> float:
    """Correlation of two thumbnails over their overlap, the first shifted by `offset` pixels along the second."""
    low, high = max(0, offset), min(fixed.shape[1], offset + moving.shape[1])
    if high - low < SHARED * min(moving.shape[1], fixed.shape[1]):
        return 0.0
    pair = np.stack([moving[:, low - offset : high - offset].reshape(-1), fixed[:, low:high].reshape(-1)])
    first, second = _normalized(pair.astype(np.float32))
    return float(first @ second)
