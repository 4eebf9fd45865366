"""Damage records: merged, forgotten, and never believed when they are themselves damaged."""

from __future__ import annotations

from typing import Any

import pytest

from prep.cache import damage
from prep.cache.damage import Damage
from prep.cache.store import Cache
from prep.digest import canonical, seal

A, B = "ab" * 32, "cd" * 32


def row(number: int, shard: str = A) -> Damage:
    return Damage(shard=shard, field="latent", array="latent", row=number, what="bits")


def test_records_merge(cache: Cache) -> None:
    damage.record(cache, [row(1), row(2, B)])
    damage.record(cache, [row(1), row(0)])
    assert damage.recorded(cache, A) == (row(0), row(1))
    assert damage.recorded(cache, B) == (row(2, B),)
    assert list(cache.names("damaged")) == [A, B]


def test_forgotten(cache: Cache) -> None:
    damage.record(cache, [row(1)])
    damage.forget(cache, A)
    damage.forget(cache, A)
    assert damage.recorded(cache, A) == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        canonical(seal({"format": "latentry/damage", "version": 1, "shard": B, "damages": []})),
        canonical(seal({"format": "latentry/damage", "version": 2, "shard": A, "damages": []})),
        canonical(seal({"format": "latentry/damage", "version": 1, "shard": A, "damages": [{"row": "1"}]})),
        canonical(seal({"format": "latentry/damage", "version": 1, "shard": A, "damages": 3})),
    ],
)
def test_a_damaged_record_counts_against_the_whole_shard(cache: Cache, data: bytes) -> None:
    cache.damaged(A).parent.mkdir()
    cache.damaged(A).write_bytes(data)
    (found,) = damage.recorded(cache, A)
    assert (found.array, found.row) == (None, None)


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_reader(cache: Cache, monkeypatch: Any) -> None:
    def refuse(*rest: Any, **named: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(damage.files, "write_whole", refuse)
    damage.record_if_writable(cache, [row(1)])
    with pytest.raises(PermissionError):
        damage.record(cache, [row(1)])
