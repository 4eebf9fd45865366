"""Keyed permutations of 0..n-1 that are looked up in O(1).

There is no generator state to carry along, so a draw is the same on 1 or 8 ranks and after any resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # Luby and Rackoff prove 4 for an ideal round function; ours is a hash of 64 bits, so twice as many
LEAST_HALF = 3  # bits; smaller halves have too few round functions to reach every permutation evenly

# SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))
_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # of the same; the distance between the states of its stream


def permute(indices: NDArray[np.int64] | int, size: int, key: bytes) -> NDArray[np.int64]:
    """Maps `indices` by the permutation of 0..size-1 that `key` chooses; same shape, O(1) for each index.

    A Feistel network over the next power of four, applied until the result is below `size` (Black and Rogaway, CT-RSA
    2002, method 2): fewer than 4 rounds on average, 64 / size for the smallest sizes.
    """
    numbers = np.asarray(indices, dtype=np.int64)
    assert numbers.size == 0 or (numbers.min() >= 0 and numbers.max() < size), f"an index is not below {size}"
    half, keys = np.uint64(_half(size)), _round_keys(key)
    walking = _feistel(numbers.astype(np.uint64).ravel(), half, keys)
    while (outside := walking >= np.uint64(size)).any():
        walking[outside] = _feistel(walking[outside], half, keys)
    return walking.astype(np.int64).reshape(numbers.shape)


def permute_each(indices: NDArray[np.int64], which: NDArray[np.int64], sizes: Sequence[int],
                 keys: Sequence[bytes], parts: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Like `permute`, for many permutations at once: indices[i] by that of sizes[which[i]] and keys[which[i]].

    With `parts`, each key chooses a permutation for each number in it: hashing a key for each would take longer.
    In blocks an index costs a tenth of what it costs one permutation at a time (40 permutations, 2048 indices).
    """
    limits, halves_K = np.array(sizes, np.uint64)[which], np.array([_half(size) for size in sizes], np.uint64)
    rounds_RK = np.array([_round_keys(key) for key in keys], np.uint64).reshape(-1, ROUNDS).T
    halves, rounds = halves_K[which], rounds_RK[:, which]
    if parts is not None:
        rounds = _mixed(rounds + (parts.astype(np.uint64) + np.uint64(1)) * _GAMMA)  # SplitMix64, seeded by each
    assert (indices >= 0).all() and (indices.astype(np.uint64) < limits).all(), "an index is not below its size"
    walking = _feistel(indices.astype(np.uint64), halves, rounds)
    if parts is None:
        _walk_smallest(walking, limits, which, halves_K, rounds_RK)
    while len(outside := np.flatnonzero(walking >= limits)):
        walking[outside] = _feistel(walking[outside], halves[outside], rounds[:, outside])
    return walking.astype(np.int64)


def _walk_smallest(walking: NDArray[np.uint64], limits: NDArray[np.uint64], which: NDArray[np.int64],
                   halves_K: NDArray[np.uint64], rounds_RK: NDArray[np.uint64]) -> None:
    """Walks the indices of the smallest networks on until they are below their limits, by tables of all their values:
    such indices walk the farthest, and few of them at a time. K keys, R rounds."""
    smallest = halves_K == LEAST_HALF
    outside = np.flatnonzero((walking >= limits) & smallest[which])
    if not len(outside):
        return
    values = np.arange(1 << 2 * LEAST_HALF, dtype=np.uint64)
    table = _feistel(values, np.uint64(LEAST_HALF), rounds_RK[:, smallest, np.newaxis])  # [smallest, values]
    rows = (np.cumsum(smallest) - 1)[which]
    while len(outside):
        walking[outside] = table[rows[outside], walking[outside]]
        outside = outside[walking[outside] >= limits[outside]]


def _half(size: int) -> int:
    """Half the bits of the Feistel network for `size`."""
    return max(LEAST_HALF, ((size - 1).bit_length() + 1) // 2)


def _round_keys(key: bytes) -> list[np.uint64]:
    """One 64-bit number per round."""
    stream = b"".join(hashlib.sha256(key + bytes([number])).digest() for number in range(ROUNDS // 4))
    return [np.uint64(int.from_bytes(stream[start : start + 8], "little")) for start in range(0, 8 * ROUNDS, 8)]


def _feistel(values: NDArray[np.uint64], half: NDArray[np.uint64] | np.uint64,
             keys: Iterable[NDArray[np.uint64] | np.uint64]) -> NDArray[np.uint64]:
    """Applies the rounds; `half` and each of `keys` are scalars, or arrays like `values`."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << half | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> _SHIFT[0]) * _MULTIPLY[0]  # arrays of uint64 wrap, as they should
    values = (values ^ values >> _SHIFT[1]) * _MULTIPLY[1]
    return values ^ values >> _SHIFT[2]
