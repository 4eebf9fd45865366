"""Small caches and rows, drawn from a seed; every test of the cache starts from these."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prep.cache import layout
from prep.cache.layout import Shard
from prep.cache.store import Cache, open_cache
from prep.cache.writer import ShardWriter
from prep.records import ArraySpec

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
            drawn[key][spec.name] = bits.view(layout.NUMPY[spec.dtype]).reshape(spec.shape)
    return drawn


def put_shard(cache: Cache, field: str, specs: Sequence[ArraySpec], rows: Rows) -> Shard:
    """The finished shard of `rows`."""
    with ShardWriter(cache, field, specs) as writer:
        for key, values in rows.items():
            writer.add(key, values)
        return writer.finish()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """An empty cache."""
    return open_cache(tmp_path / "cache", create=True)


@pytest.fixture
def latent() -> ArraySpec:
    """A tiny latent."""
    return LATENT


@pytest.fixture(scope="session")
def draw() -> Callable[..., Rows]:
    """`draw(specs, rows, seed=0)`: random rows by key."""
    return draw_rows


@pytest.fixture(scope="session")
def put() -> Callable[..., Shard]:
    """`put(cache, field, specs, rows)`: a finished shard."""
    return put_shard


@pytest.fixture
def shard(cache: Cache) -> Shard:
    """A shard of seven tiny latents, in `cache`."""
    return put_shard(cache, "latent", [LATENT], draw_rows([LATENT], 7))


@pytest.fixture
def rows() -> Rows:
    """The rows of `shard`."""
    return draw_rows([LATENT], 7)


@pytest.fixture
def edit() -> Callable[..., None]:
    """`edit(path, change)`: rewrites a protected file; `change` maps its bytes to others."""

    def rewrite(path: Path, change: Callable[[bytearray], Any]) -> None:
        data = bytearray(path.read_bytes())
        changed = change(data)
        path.chmod(0o644)
        path.write_bytes(data if changed is None else changed)

    return rewrite
