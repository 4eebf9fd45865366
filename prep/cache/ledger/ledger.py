"""Knows which keys the cache has and where, from commits and the shards that they name; see `inventory.py`.

Missing or damaged rows are encoded again. Takes 40 bytes per row, without strings.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import compress, islice
from operator import lt
from typing import Any

import numpy as np

from prep.cache.commits import VERSION, as_json, read_commit
from prep.cache.ledger.columns import Column, Columns, Places, gather, locate, packed
from prep.cache.ledger.index import load_index
from prep.cache.ledger.inventory import Inventory, is_of_its_field, sound_rows, take_inventory
from prep.cache.records import Reject, RowRef, Shard, Task
from prep.cache.remote.stored import refresh, refresh_task
from prep.cache.remote.unsent import settle, upload_shard
from prep.cache.shard_header import read_keys
from prep.cache.store import Cache
from prep.digest import canonical, with_checksum
from prep.fs import atomic
from prep.fs.remote.retry import NEVER


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Keys and places at the time of loading; `write_commit` adds to the cache, not to the ledger."""

    keys: Column  # S32 [N], sorted; a key may appear twice, in two shards
    shard: Column  # int32 [N]: index into shards
    row: Column  # int32 [N]
    shards: tuple[Shard, ...]  # sorted by digest
    fields: tuple[str, ...]  # of each shard
    rejects: Mapping[str, Reject]
    commits: frozenset[str]  # tasks whose rows are all present

    def find(self, key: str) -> RowRef | None:
        """The place of a row; None if it must be encoded. (33 µs; per key of many: `resolve` 1.5 µs, `locate` 0.2.)"""
        return self.resolve([key]).get(key)

    def rejected(self, key: str) -> Reject | None:
        """Why a row could not be encoded, if that was tried and the row is in no shard."""
        return self.rejects.get(key)

    def has_commit(self, task: str) -> bool:
        """Whether a task is finished and none of its rows is missing or damaged."""
        return task in self.commits

    def resolve(self, wanted: Iterable[str]) -> StoredRows:
        """The place of every wanted key that the cache has.

        If two shards hold a row, the shard with more of the wanted rows is chosen, then the smaller digest.
        """
        names = list(wanted) if self.shards else []
        if not all(map(lt, names, islice(names, 1, None))):  # a recipe's keys are sorted; sorting takes a third
            names = sorted(set(names))
        places = self.locate(packed(names))
        found = StoredRows(names, places, [shard.digest for shard in self.shards])
        return found if (present := places.present).all() else found.chosen(present)

    def locate(self, wanted: Column) -> Places:
        """Like `resolve`, but as columns, for very many keys (S32 [N], see `packed`): no string or record per row."""
        columns = Columns(keys=self.keys, shard=self.shard, row=self.row)
        return locate(columns, wanted, len(self.shards))


class StoredRows(Mapping[str, RowRef]):
    """Places of rows by key: 16 bytes a row beside its key, where a dict of records takes 130. A look-up takes 2 µs."""

    def __init__(self, names: Sequence[str], places: Places, digests: Sequence[str]) -> None:
        """`names`: the keys, sorted, in the order of `places`; `digests`: of the shards."""
        self._names, self._places, self._digests = names, places, digests
        self._shard, self._row = places.shard.data, places.row.data  # whose elements are Python's numbers

    def __getitem__(self, key: str) -> RowRef:
        place = bisect_left(self._names, key)
        if place == len(self._names) or self._names[place] != key:
            raise KeyError(key)
        return RowRef(shard=self._digests[self._shard[place]], row=self._row[place])

    def __contains__(self, key: object) -> bool:
        place = bisect_left(self._names, key) if isinstance(key, str) else len(self._names)
        return place < len(self._names) and self._names[place] == key

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def only(self, keys: Container[str]) -> StoredRows:
        """Those of `keys` that are there."""
        return self.chosen(np.fromiter((name in keys for name in self._names), bool, len(self._names)))

    def chosen(self, chosen: Column) -> StoredRows:
        """Those for which `chosen`, bool [N], is true."""
        places = Places(shard=self._places.shard[chosen], row=self._places.row[chosen])
        return StoredRows(list(compress(self._names, chosen.tolist())), places, self._digests)

    def by_shard(self) -> dict[str, int]:
        """How many of the rows each shard has, without shards that have none."""
        numbers, counts = np.unique(self._places.shard, return_counts=True)
        return {self._digests[shard]: count for shard, count in zip(numbers.tolist(), counts.tolist(), strict=True)}


def empty_ledger() -> Ledger:
    """The ledger of a cache that does not exist yet."""
    return _ledger(Inventory(commits=(), shards=(), counts=(), columns=gather([])))


def load_ledger(cache: Cache, *, remember: bool = False) -> Ledger:
    """Loads the ledger of a cache: checks the stamp of every commit and shard, reads those the look-up file lacks.

    `remember` rewrites the look-up file if enough has changed. What is in a store is asked for first.
    """
    refresh(cache)
    return _ledger(take_inventory(cache, load_index(cache), remember=remember))


def ledger_at_hand(cache: Cache) -> Ledger:
    """As `load_ledger`, and asks no store: of a cache there, no row counts."""
    return load_ledger(cache) if cache.store is None else empty_ledger()


def write_commit(
    cache: Cache, task: Task, shard: Shard | None, rejects: Iterable[Reject], provenance: Mapping[str, Any],
    *, stop: threading.Event = NEVER
) -> bool:
    """Records a finished task, after its shard is published; returns False if another process has already done so.

    Replaces a commit whose shard is missing or damaged. To a store, the shard is uploaded before: `CacheError` if that
    fails, `Stopped`.
    """
    document = commit_document(task.key, task.field, shard, rejects, provenance)
    target = cache.commit(task.key)
    if shard is not None:
        upload_shard(cache, shard.digest, stop=stop)
    new = cache.create(target, document, stop=stop)
    if not new and not is_done(cache, task.key):
        cache.replace(target, document, stop=stop)
        new = True
    if shard is not None:
        settle(cache, shard.digest)
    return new


def forget_rejects(cache: Cache, keys: Set[str]) -> None:
    """Makes these rows count as never tried: drops them from commits, and removes commits that are left without rows.

    The next run then plans them again, and its commits replace the old ones: however often a row is rejected, there is
    at most one more commit. If this is interrupted, the next run tries the rows that were dropped so far.

    What is in a store is asked for first: another computer may have rejected them, or replaced a commit.
    """
    refresh(cache)
    for task in list(cache.names("commits")):
        commit = read_commit(cache, task)
        if commit is None or not any(reject.key in keys for reject in commit.rejects):
            continue
        rejects = [reject for reject in commit.rejects if reject.key not in keys]
        if commit.shard is None and not rejects:
            cache.discard(cache.commit(task))
        else:
            document = commit_document(task, commit.field, commit.shard, rejects, commit.provenance)
            cache.replace(cache.commit(task), document)


def is_done(cache: Cache, task: str) -> bool:
    """Like `is_finished`, and asks the store of a cache there."""
    refresh_task(cache, task)
    return is_finished(cache, task)


def is_finished(cache: Cache, task: str) -> bool:
    """Whether a task's commit exists with all its rows, without the look-up file."""
    commit = read_commit(cache, task)
    if commit is None:
        return False
    return commit.shard is None or sound_rows(cache, commit.shard) == commit.shard.rows


def remove_foreign_commits(cache: Cache, tasks: Iterable[Task]) -> None:
    """Removes commits that do not have their task's rows; `tasks` are tasks of which the cache has no row.

    A task's key is the digest of its rows, so Latentry never writes such a commit; it would block the task forever.
    """
    existing = set(cache.names("commits"))  # one listing: most tasks have none
    for task in tasks:
        commit = read_commit(cache, task.key) if task.key in existing else None
        if commit is None or (commit.shard is not None and sound_rows(cache, commit.shard) != commit.shard.rows):
            continue  # counts as missing, and will be replaced
        keys = {reject.key for reject in commit.rejects}
        if commit.shard is not None:
            keys |= {bytes(key).hex() for key in read_keys(cache, commit.shard.digest)}
        if commit.field != task.field or not keys.issuperset(task.rows) or not is_of_its_field(cache, commit):
            atomic.remove(cache.commit(task.key))


def commit_document(
    task: str, field: str, shard: Shard | None, rejects: Iterable[Reject], provenance: Mapping[str, Any]
) -> bytes:
    """The bytes of a commit."""
    return canonical(with_checksum({
        **provenance,
        "format": "latentry/commit", "version": VERSION, "task": task, "field": field,
        "shard": shard.digest if shard else None,
        "rows": shard.rows if shard else 0,
        "bytes": shard.bytes if shard else 0,
        "rejects": [as_json(reject) for reject in rejects],
    }))


def _ledger(census: Inventory) -> Ledger:
    rejects = {reject.key: reject for commit in census.commits for reject in commit.rejects}
    made = locate(census.columns, packed(rejects), len(census.shards)).present.tolist()  # encoded by another task
    whole = {shard.digest for (shard, _), rows in zip(census.shards, census.counts, strict=True) if rows == shard.rows}
    return Ledger(
        keys=census.columns.keys, shard=census.columns.shard, row=census.columns.row,
        shards=tuple(shard for shard, _ in census.shards), fields=tuple(field for _, field in census.shards),
        rejects={key: reject for (key, reject), stored in zip(rejects.items(), made, strict=True) if not stored},
        commits=frozenset(commit.task for commit in census.commits
                          if commit.shard is None or commit.shard.digest in whole),
    )
