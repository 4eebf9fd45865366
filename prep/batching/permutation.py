"""Everything drawn by chance, keyed by what it is for: permutations, random numbers, the choice of validation samples.

No generator is carried along, so a draw is the same on 1 or 8 ranks and after any resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from prep.digest import HOLE, around, canonical, digest_spelled, string
from prep.errors import ConfigError

MEANING = 1  # raised when the same key would give another draw
ROUNDS = 8  # Luby and Rackoff prove 4 for an ideal round function; ours is a hash of 64 bits, so twice as many
LEAST_HALF = 3  # bits; smaller halves have too few round functions to reach every permutation evenly

# SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))


def permute(indices: NDArray[np.int64] | int, size: int, key: bytes) -> NDArray[np.int64]:
    """Where a permutation of 0..size-1, chosen by `key`, sends `indices`; same shape; O(1) for each.

    A Feistel network over the next power of four, walked on until it lands below `size` (Black and Rogaway, CT-RSA
    2002, method 2): fewer than 4 walks on average, 64 / size for the smallest sizes.
    """
    given = np.asarray(indices, dtype=np.int64)
    assert given.size == 0 or (given.min() >= 0 and given.max() < size), f"an index is not below {size}"
    half, keys = np.uint64(_half(size)), _round_keys(key)
    walking = _feistel(given.astype(np.uint64).ravel(), half, keys)
    while (outside := walking >= np.uint64(size)).any():
        walking[outside] = _feistel(walking[outside], half, keys)
    return walking.astype(np.int64).reshape(given.shape)


def permute_each(indices: NDArray[np.int64], which: NDArray[np.int64], sizes: Sequence[int],
                 keys: Sequence[bytes]) -> NDArray[np.int64]:
    """`permute` of many permutations at once: indices[i] by that of sizes[which[i]] and keys[which[i]].

    Numbers in blocks cost a tenth of what they cost one permutation at a time (40 of them, 2048 numbers).
    """
    limits, halves = np.array(sizes, np.uint64)[which], np.array([_half(size) for size in sizes], np.uint64)[which]
    rounds = np.array([_round_keys(key) for key in keys], np.uint64).T[:, which]  # [ROUNDS, indices]
    assert (indices >= 0).all() and (indices.astype(np.uint64) < limits).all(), "an index is not below its size"
    walking = _feistel(indices.astype(np.uint64), halves, rounds)
    while len(outside := np.flatnonzero(walking >= limits)):
        walking[outside] = _feistel(walking[outside], halves[outside], rounds[:, outside])
    return walking.astype(np.int64)


def _half(size: int) -> int:
    """Bits of half a number of the network that `size` is walked in."""
    return max(LEAST_HALF, ((size - 1).bit_length() + 1) // 2)


def _round_keys(key: bytes) -> list[np.uint64]:
    """One number of 64 bits for each round."""
    stream = b"".join(hashlib.sha256(key + bytes([number])).digest() for number in range(ROUNDS // 4))
    return [np.uint64(int.from_bytes(stream[start : start + 8], "little")) for start in range(0, 8 * ROUNDS, 8)]


def _feistel(values: NDArray[np.uint64], half: NDArray[np.uint64] | np.uint64,
             keys: Iterable[NDArray[np.uint64] | np.uint64]) -> NDArray[np.uint64]:
    """`half` and each of `keys` are one for all values, or one for each."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << half | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> _SHIFT[0]) * _MULTIPLY[0]  # arrays of uint64 wrap, as they should
    values = (values ^ values >> _SHIFT[1]) * _MULTIPLY[1]
    return values ^ values >> _SHIFT[2]


def plan_key(what: str, seed: int, epoch: int, *where: int) -> bytes:
    """32 bytes for a permutation. Hashed, so that seed 1, epoch 0 and seed 0, epoch 1 have nothing in common."""
    document = {"kind": "plan", "meaning": MEANING, "what": what, "seed": seed, "epoch": epoch, "where": list(where)}
    return hashlib.sha256(canonical(document)).digest()


def draw_key(seed: int, epoch: int, sample_id: bytes, occurrence: int, purpose: str) -> tuple[int, int]:
    """The Philox key, two numbers of 64 bits, for one draw of one showing of a sample."""
    document = {"kind": "draw", "meaning": MEANING, "seed": seed, "epoch": epoch, "sample": sample_id.hex(),
                "occurrence": occurrence, "purpose": purpose}
    digest = hashlib.sha256(canonical(document)).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def philox(key: tuple[int, int]) -> np.random.Generator:
    """A generator at the start of the stream that `key` names."""
    return np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))


def is_validation(picture: str, fraction: Fraction | float | str, salt: str = "latentry") -> bool:
    """Whether the picture with this digest is for validation: it depends on nothing else in the data set."""
    return _rank(picture, salt) < _share(fraction) * 2**256


def choose_validation(
    pictures: Iterable[str], fraction: Fraction | float | str, salt: str = "latentry"
) -> tuple[frozenset[str], str | None]:
    """The pictures (by digest) for validation, and a notice where the fraction alone would have chosen none."""
    ranks, share = _ranks(set(pictures), salt), _share(fraction)
    below = share.numerator * 2**256
    chosen = frozenset(picture for picture, rank in ranks.items() if rank * share.denominator < below)
    if chosen or not share or len(ranks) < 2:
        return chosen, None
    notice = f"validation.fraction {fraction} of {len(ranks)} pictures chose none, so one was taken"
    return frozenset([min(ranks, key=lambda picture: ranks[picture])]), notice


def _rank(picture: str, salt: str) -> int:
    """A number below 2²⁵⁶, spread evenly."""
    return _ranks([picture], salt)[picture]


def _ranks(pictures: Iterable[str], salt: str) -> dict[str, int]:
    first, last = around({"kind": "validation", "meaning": MEANING, "salt": salt, "picture": HOLE})
    return {picture: int(digest_spelled(f"{first}{string(picture)}{last}"), 16) for picture in pictures}


def _share(fraction: Fraction | float | str) -> Fraction:
    """The exact fraction as written: 0.05 is 1/20, not the nearest binary number. Raises `ConfigError`."""
    try:
        share = Fraction(str(fraction))
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share < 1:
        raise ConfigError(f"validation.fraction is {fraction}, expected a number from 0 up to, but not including, 1")
    return share
