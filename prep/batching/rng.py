"""Keyed random streams: each draw has a key, hashed from its purpose, which seeds a Philox generator."""

from __future__ import annotations

import hashlib

import numpy as np

from prep.batching.split import MEANING
from prep.digest import canonical


def plan_key(what: str, seed: int, epoch: int, *where: int) -> bytes:
    """The 32-byte key of a permutation. Hashed, so that seed 1, epoch 0 and seed 0, epoch 1 are unrelated."""
    document = {"kind": "plan", "meaning": MEANING, "what": what, "seed": seed, "epoch": epoch, "where": list(where)}
    return hashlib.sha256(canonical(document)).digest()


def plan_number(what: str, below: int, seed: int, epoch: int, *where: int) -> int:
    """A number from 0 to `below` - 1, uniform but for one part in 2⁶⁴ / `below`."""
    return int.from_bytes(plan_key(what, seed, epoch, *where)[:8], "little") % below


def draw_key(seed: int, epoch: int, sample_id: bytes, occurrence: int, purpose: str) -> tuple[int, int]:
    """The Philox key, two 64-bit numbers, for one draw in one showing of a sample."""
    document = {"kind": "draw", "meaning": MEANING, "seed": seed, "epoch": epoch, "sample": sample_id.hex(),
                "occurrence": occurrence, "purpose": purpose}
    digest = hashlib.sha256(canonical(document)).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def philox(key: tuple[int, int], stream: int = 0) -> np.random.Generator:
    """A generator at the start of one of the streams of `key`, which are independent: their counters never meet."""
    start = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64), counter=start))
