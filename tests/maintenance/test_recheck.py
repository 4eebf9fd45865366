"""What `prep encode --recheck` finds: damage of reused rows that no record tells of."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prep.cache import damage
from prep.cache.damage import Damage
from prep.cache.ledger.ledger import load_ledger, write_commit
from prep.cache.records import Shard, Task
from prep.cache.store import Cache
from prep.digest import digest_json
from prep.errors import CacheError
from prep.maintenance import recheck as module
from prep.maintenance.recheck import recheck

DATA = "latent/c.0.0.0.0"


class Shown:
    """Progress that is written down."""

    def __init__(self) -> None:
        self.total = self.done = 0

    @contextmanager
    def __call__(self, title: str, total: Any, unit: str) -> Iterator[Any]:
        assert (title, unit) == ("verifying", "bytes")
        self.total += total

        def tick(count: int) -> None:
            self.done += count

        yield tick


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def two(cache: Cache, draw: Any, put: Any, latent: Any) -> tuple[Cache, dict[str, Any], list[Shard]]:
    """A cache in which two shards have the same four rows, and one of them three more."""
    rows = draw([latent], 7)
    shards = []
    for part in (rows, dict(list(rows.items())[:4])):
        shards.append(put(cache, "latent", [latent], part))
        task = Task(key=digest_json(list(part)), field="latent", rows=tuple(part))
        write_commit(cache, task, shards[-1], [], {})
    return cache, rows, shards


def flip(cache: Cache, shard: Shard, edit: Any, row: int = 0) -> None:
    edit(cache.shard(shard.digest) / DATA, lambda data: data.__setitem__(row * 52, data[row * 52] ^ 1))


def test_what_is_sound_is_read_once(two: Any, shown: Shown) -> None:
    cache, rows, shards = two
    recheck(cache, list(rows), jobs=2, progress=shown)
    assert shown.total == shown.done == max(shard.bytes for shard in shards)
    assert list(cache.names("damaged")) == []


def test_damage_is_recorded_also_in_a_shard_that_takes_the_first_ones_place(
    two: Any, shown: Shown, edit: Any
) -> None:
    cache, rows, shards = two
    for shard in shards:
        flip(cache, shard, edit)
    assert len(load_ledger(cache).resolve(rows)) == 7, "nothing tells of it"
    recheck(cache, list(rows), jobs=1, progress=shown)
    assert sorted(cache.names("damaged")) == sorted(shard.digest for shard in shards)
    assert len(load_ledger(cache).resolve(rows)) == 6


def test_a_row_that_is_not_finite_is_encoded_again(cache: Cache, draw: Any, put: Any, latent: Any) -> None:
    rows = draw([latent], 3)
    bad = list(rows)[1]
    rows[bad]["latent"].view("<u2")[0, 0, 0] = 0x7FC0
    shard = put(cache, "latent", [latent], rows)
    write_commit(cache, Task(key=digest_json(list(rows)), field="latent", rows=tuple(rows)), shard, [], {})
    recheck(cache, list(rows), jobs=1, progress=Shown())
    assert set(rows) - set(load_ledger(cache).resolve(rows)) == {bad}


def test_shards_of_others_are_not_read(two: Any, shown: Shown, edit: Any, draw: Any, put: Any, latent: Any) -> None:
    cache, rows, _ = two
    other = put(cache, "latent", [latent], draw([latent], 3, 5))
    flip(cache, other, edit)
    recheck(cache, list(rows), jobs=1, progress=shown)
    assert list(cache.names("damaged")) == []


def test_damage_that_cannot_be_recorded_ends_it(
    two: Any, shown: Shown, edit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, rows, shards = two

    def full(*given: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    flip(cache, shards[0], edit)
    monkeypatch.setattr(Cache, "write", full)
    with pytest.raises(CacheError, match=f"shard {shards[0].digest} is damaged, and that cannot be recorded") as caught:
        recheck(cache, list(rows), jobs=1, progress=shown)
    assert caught.value.hint.startswith("free some space")


def test_a_shard_that_cannot_be_read_ends_it(two: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, rows, _ = two

    def closed(cache: Cache, digest: str, *, tick: Any) -> list[Damage]:
        return [Damage(shard=digest, field=None, array=None, row=None, what="cannot be read: no", transient=True)]

    monkeypatch.setattr(module, "verify_shard", closed)
    with pytest.raises(CacheError, match="cannot be read: no") as caught:
        recheck(cache, list(rows), jobs=1, progress=shown)
    assert caught.value.hint.startswith("check the permissions") and damage.recorded(cache, "ab" * 32) == ()
