"""Small caches and rows, drawn from a seed; every test of the cache starts from these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_rows import LATENT, Rows, draw_rows, put_shard

from prep.arrays import ArraySpec
from prep.cache.records import Shard
from prep.cache.store import Cache, open_cache


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
