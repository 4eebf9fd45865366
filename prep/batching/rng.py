"""Keyed random streams: a key for every draw, hashed from what the draw is for, and the Philox generator it starts."""

from __future__ import annotations

import hashlib

import numpy as np

from prep.batching.split import MEANING
from prep.digest import canonical


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
