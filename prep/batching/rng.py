"""Keyed random streams: each draw has a key, hashed from its purpose, which seeds a Philox generator."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from prep.batching.split import MEANING
from prep.digest import HOLE, canonical, json_template, string

_DRAW = json_template({"kind": "draw", "meaning": MEANING, "seed": HOLE, "epoch": HOLE, "sample": HOLE,
                       "occurrence": HOLE, "purpose": HOLE})


def plan_key(what: str, seed: int, epoch: int, *where: int) -> bytes:
    """The 32-byte key of a permutation. Hashed, so that seed 1, epoch 0 and seed 0, epoch 1 are unrelated."""
    document = {"kind": "plan", "meaning": MEANING, "what": what, "seed": seed, "epoch": epoch, "where": list(where)}
    return hashlib.sha256(canonical(document)).digest()


def plan_number(what: str, below: int, seed: int, epoch: int, *where: int) -> int:
    """A number from 0 to `below` - 1, uniform but for one part in 2⁶⁴ / `below`."""
    return int.from_bytes(plan_key(what, seed, epoch, *where)[:8], "little") % below


def draw_key(seed: int, epoch: int, sample_id: bytes, occurrence: int, purpose: str) -> tuple[int, int]:
    """The Philox key, two 64-bit numbers, for one draw in one showing of a sample."""
    start, to_occurrence, to_purpose, to_sample, to_seed, end = _DRAW
    spelled = (f"{start}{epoch:d}{to_occurrence}{occurrence:d}{to_purpose}{string(purpose)}{to_sample}"
               f'"{sample_id.hex()}"{to_seed}{seed:d}{end}')
    digest = hashlib.sha256(spelled.encode("ascii")).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


class _Key(ISeedSequence):
    """Hands a key to Philox as it is. Philox's own argument `key` takes three times as long: besides, it then asks the
    operating system for entropy."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """The key. Philox asks for two words of uint64."""
        assert (n_words, dtype) == (2, np.uint64)
        return np.array(self._key, np.uint64)


def philox(key: tuple[int, int], stream: int = 0) -> np.random.Generator:
    """A generator at the start of one of the streams of `key`, which are independent: their counters never meet."""
    keyed: Any = _Key(key)  # numpy's annotations name only its own kind of seed sequence
    return np.random.Generator(np.random.Philox(keyed, counter=_start(stream)))


@cache
def _start(stream: int) -> Any:
    """The counter of a stream, which Philox copies."""
    start = np.array([0, 0, 0, stream], dtype=np.uint64)
    start.setflags(write=False)
    return start
