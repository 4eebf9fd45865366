"""Planning holds the wanted keys once, however many there are: no text of all of them, no second copy of each."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prep.cache.store import Cache, open_cache
from prep.encode.plan import plan
from prep.manifest.samples import in_table_order

KEYS = sorted(hashlib.sha256(b"%d" % number).hexdigest() for number in range(30_000))
ROWS = 10  # of a task


@dataclass(frozen=True, slots=True)
class OneView:
    """A sample, and its only view."""

    id: str
    name: str = ""

    def keys(self, field: str) -> list[str]:
        return [self.id]


@contextmanager
def bytes_a_row() -> Iterator[list[float]]:
    """The most memory that the block takes at once, over what was there before."""
    found: list[float] = []
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1] / len(KEYS))
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def wanted() -> Any:
    samples = [OneView(key) for key in reversed(KEYS)]
    targets = SimpleNamespace(samples=samples, keys=lambda: KEYS,
                            by_field=lambda: {"latent": KEYS, "mask": [], "text": []})
    return SimpleNamespace(targets=targets, text_groups=SimpleNamespace(count=lambda keys: None),
                           group_of=lambda field, key: (64, 64), row_bytes=lambda field, key: 1 << 16)


def test_a_plan_takes_less_memory_than_its_keys(cache: Cache, wanted: Any, tmp_path: Path) -> None:
    """A key as a string takes 113 bytes."""
    plan(wanted, open_cache(tmp_path / "another", create=True))  # what is imported and kept once is not counted
    with bytes_a_row() as first:
        made = plan(wanted, cache, shard_bytes=ROWS << 16)
    with bytes_a_row() as again:
        followed = plan(wanted, cache, shard_bytes=ROWS << 16)
    assert made.tasks == followed.tasks and len(made.tasks) == len(KEYS) / ROWS
    assert first[0] < 150 and again[0] < 200, "120 and 160; with all keys spelled, or there twice, 190 and 290"
    own = set(map(id, KEYS))
    assert all(id(key) in own for task in followed.tasks for key in task.rows), "keys are there twice"


def test_samples_of_one_id_are_in_the_order_of_their_names() -> None:
    samples: list[Any] = [OneView("b", "1"), OneView("a", "2"), OneView("a", "1"), OneView("b", "0")]
    assert [(one.id, one.name) for one in in_table_order(samples)] == [("a", "1"), ("a", "2"), ("b", "0"), ("b", "1")]
