"""Damage records: merged, forgotten, and never believed when they are themselves damaged."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prep.cache import damage
from prep.cache.damage import Damage
from prep.cache.store import Cache, open_cache
from prep.digest import canonical, with_checksum
from prep.fs import atomic

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
        canonical(with_checksum({"format": "latentry/damage", "version": 1, "shard": B, "damages": []})),
        canonical(with_checksum({"format": "latentry/damage", "version": 2, "shard": A, "damages": []})),
        canonical(with_checksum({"format": "latentry/damage", "version": 1, "shard": A, "damages": [{"row": "1"}]})),
        canonical(with_checksum({"format": "latentry/damage", "version": 1, "shard": A, "damages": 3})),
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

    monkeypatch.setattr(atomic, "write_atomic", refuse)
    damage.record_if_writable(cache, [row(1)])
    with pytest.raises(PermissionError):
        damage.record(cache, [row(1)])


def test_what_is_known_is_not_written_again(cache: Cache) -> None:
    damage.record(cache, [row(1), row(0)])
    stamp = cache.damaged(A).stat().st_mtime_ns, cache.damaged(A).stat().st_ino
    damage.record(cache, [row(1)])
    assert (cache.damaged(A).stat().st_mtime_ns, cache.damaged(A).stat().st_ino) == stamp


def test_replaced(cache: Cache) -> None:
    damage.replace(cache, A, [])
    assert not (cache.root / "damaged").exists()
    damage.record(cache, [row(1)])
    damage.replace(cache, A, [row(2)])
    assert damage.recorded(cache, A) == (row(2),)
    damage.replace(cache, A, [])
    assert damage.recorded(cache, A) == ()


def recorder(root: Path, numbers: range) -> None:
    """A process of its own."""
    for number in numbers:
        damage.record(open_cache(root, create=False), [row(number)])


def all_record(cache: Cache, writers: int, each: int) -> set[int | None]:
    """The rows that are remembered after `writers` processes have told of `each` rows at once."""
    context = multiprocessing.get_context("spawn")
    parts = [range(number * each, (number + 1) * each) for number in range(writers)]
    processes = [context.Process(target=recorder, args=(cache.root, part)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * writers
    return {found.row for found in damage.recorded(cache, A)}


def test_no_finding_is_lost_between_processes_that_record_at_once(cache: Cache) -> None:
    assert all_record(cache, 3, 12) == set(range(36))


def test_no_finding_is_lost_between_threads(cache: Cache) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: damage.record(cache, [row(number)]), range(48)))
    assert {found.row for found in damage.recorded(cache, A)} == set(range(48))


def test_the_test_of_lost_findings_sees_them(cache: Cache, monkeypatch: Any) -> None:
    """Without the lock some are lost."""
    together = threading.Barrier(2, timeout=10)

    def recorded(*given: Any) -> Any:
        known = plain(*given)
        together.wait()
        return known

    plain = damage.recorded
    monkeypatch.setattr(damage, "try_lock", lambda handle, alone: lambda: None)
    monkeypatch.setattr(damage, "recorded", recorded)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: damage.record(cache, [row(number)]), range(2)))
    assert len(plain(cache, A)) == 1


def test_a_lock_file_that_is_deleted_loses_no_finding(cache: Cache, monkeypatch: Any) -> None:
    """Whoever waited for the deleted file takes the lock again, on the file that is there now."""
    plain, opened = damage.try_lock, []

    def deleted(handle: Any, alone: bool) -> Any:
        if not opened:
            (cache.root / "damaged" / "lock").unlink()
        opened.append(os.fstat(handle.fileno()).st_nlink)
        return plain(handle, alone)

    monkeypatch.setattr(damage, "try_lock", deleted)
    damage.record(cache, [row(1)])
    assert opened == [0, 1] and damage.recorded(cache, A) == (row(1),)


@pytest.mark.parametrize("answer", [None, OSError(37, "No locks available")])
def test_without_a_lock_the_finding_is_recorded_all_the_same(cache: Cache, monkeypatch: Any, answer: Any) -> None:
    def refuse(handle: Any, alone: bool) -> None:
        if answer:
            raise answer

    monkeypatch.setattr(damage, "try_lock", refuse)
    monkeypatch.setattr(damage, "PATIENCE", 0.01)
    damage.record(cache, [row(1)])
    assert damage.recorded(cache, A) == (row(1),)


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links need rights here")
@pytest.mark.parametrize("link", ["damaged", "damaged/lock"])
def test_no_link_in_a_cache_is_followed_for_a_lock(cache: Cache, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    if link == "damaged":
        outside.mkdir()
    else:
        (cache.root / "damaged").mkdir()
    (cache.root / link).symlink_to(outside)
    damage.record_if_writable(cache, [row(1)])
    with pytest.raises(OSError):
        damage.record(cache, [row(1)])
    assert not outside.exists() or not list(outside.iterdir())
