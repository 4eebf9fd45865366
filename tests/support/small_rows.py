"""Small rows, drawn from a seed, and shards of them; every test of the cache starts from these."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from prep.arrays import ArraySpec
from prep.cache import shard_format
from prep.cache.records import Shard
from prep.cache.store import Cache
from prep.cache.writer import ShardWriter

LATENT = ArraySpec(name="latent", dtype="bfloat16", shape=(4, 3, 2))
Rows = dict[str, dict[str, np.ndarray]]


def draw_rows(specs: Sequence[ArraySpec], rows: int, seed: int = 0) -> Rows:
    """Random values by key, keys sorted; every bit pattern but NaNs, which compare badly."""
    rng = np.random.default_rng(seed)
    keys = sorted(hashlib.sha256(f"{seed} {row}".encode()).hexdigest() for row in range(rows))
    drawn: Rows = {}
    for key in keys:
        drawn[key] = {}
        for spec in specs:
            bits = rng.integers(0, 120, (*spec.shape, spec.row_bytes // max(1, int(np.prod(spec.shape)))), np.uint8)
            drawn[key][spec.name] = bits.view(shard_format.NUMPY[spec.dtype]).reshape(spec.shape)
    return drawn


def put_shard(cache: Cache, field: str, specs: Sequence[ArraySpec], rows: Rows) -> Shard:
    """The finished shard of `rows`."""
    with ShardWriter(cache, field, specs) as writer:
        for key, values in rows.items():
            writer.add(key, values)
        return writer.finish()
