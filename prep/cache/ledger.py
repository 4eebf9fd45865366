"""Which keys the cache has, and where: read from commits and the shards they name.

Counted as missing: a commit without its shard, a shard of the wrong size or without sound keys, rows named under
damaged/. So whatever is missing is simply encoded again. Holds 40 bytes a row, no string of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prep.cache import files
from prep.cache.columns import Column, Columns, Places, gather, locate, packed
from prep.cache.commits import VERSION, as_json
from prep.cache.commits import Commit as Commit
from prep.cache.commits import read_commit as read_commit
from prep.cache.damage import recorded
from prep.cache.header import read_keys
from prep.cache.layout import Shard
from prep.cache.store import Cache
from prep.digest import canonical, seal
from prep.errors import CacheError
from prep.records import Reject, RowRef, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Keys and places as they were when the ledger was loaded; `commit` adds to the cache, not to this."""

    keys: Column  # S32 [N], sorted; a key may be there twice, in two shards
    shard: Column  # int32 [N]: index into shards
    row: Column  # int32 [N]
    shards: tuple[Shard, ...]  # sorted by digest
    fields: tuple[str, ...]  # of each shard
    rejects: Mapping[str, Reject]
    commits: frozenset[str]  # tasks whose every row is there

    def find(self, key: str) -> RowRef | None:
        """Where a row is, or None: to be encoded. (33 µs; `resolve` takes 3 µs a key.)"""
        return self.resolve([key]).get(key)

    def rejected(self, key: str) -> Reject | None:
        """Why a row could not be made, when that was tried and it is in no shard."""
        return self.rejects.get(key)

    def has_commit(self, task: str) -> bool:
        """Whether a task is finished and nothing it made is missing or damaged since."""
        return task in self.commits

    def resolve(self, wanted: Iterable[str]) -> dict[str, RowRef]:
        """The place of every wanted key that is there.

        If two shards hold a row, the one with more of the wanted rows is taken, then the smaller digest.
        """
        names = sorted(set(wanted))
        places = self.locate(packed(names))
        rows = zip(names, places.shard.tolist(), places.row.tolist(), strict=True)
        return {name: RowRef(shard=self.shards[shard].digest, row=row) for name, shard, row in rows if shard >= 0}

    def locate(self, wanted: Column) -> Places:
        """The same as columns, for very many keys (S32 [N], see `packed`): no string, no record per row."""
        columns = Columns(keys=self.keys, shard=self.shard, row=self.row)
        return locate(columns, wanted, len(self.shards))


def empty() -> Ledger:
    """The ledger of a cache that is not there yet."""
    return _ledger(gather([]), [], {}, frozenset())


def load(cache: Cache) -> Ledger:
    """The ledger of a cache: reads every commit and the keys of every shard (0.4 ms a shard of 500 rows, warm)."""
    rejects: dict[str, Reject] = {}
    shards: dict[str, tuple[Shard, str]] = {}
    finished: list[Commit] = []
    for task in cache.names("commits"):
        commit = read_commit(cache, task)
        if commit is not None:
            finished.append(commit)
            rejects.update((reject.key, reject) for reject in commit.rejects)
            if commit.shard is not None:
                shards[commit.shard.digest] = (commit.shard, commit.field)
    columns, whole = [], set()
    present: list[tuple[Shard, str]] = []
    for digest in sorted(shards):
        keys, rows = _sound_rows(cache, shards[digest][0])
        if len(rows):
            columns.append((len(present), keys, rows))
            present.append(shards[digest])
        if len(rows) == shards[digest][0].rows:
            whole.add(digest)
    return _ledger(gather(columns), present, rejects, frozenset(
        commit.task for commit in finished if commit.shard is None or commit.shard.digest in whole
    ))


def commit(
    cache: Cache, task: Task, shard: Shard | None, rejects: Iterable[Reject], provenance: Mapping[str, Any]
) -> bool:
    """Records a finished task, after its shard is in place. False when another process had it finished already.

    A commit whose shard is missing or damaged by now is replaced.
    """
    document = seal({
        **provenance,
        "format": "latentry/commit", "version": VERSION, "task": task.key, "field": task.field,
        "shard": shard.digest if shard else None,
        "rows": shard.rows if shard else 0,
        "bytes": shard.bytes if shard else 0,
        "rejects": [as_json(reject) for reject in rejects],
    })
    target = cache.commit(task.key)
    files.make_dirs(target.parent)
    if files.write_new(target, canonical(document), staging=cache.staging()):
        return True
    if is_finished(cache, task.key):
        return False
    files.write_whole(target, canonical(document), staging=cache.staging())
    return True


def is_finished(cache: Cache, task: str) -> bool:
    """Whether a task's commit is there with all its rows, looked up now."""
    found = read_commit(cache, task)
    if found is None:
        return False
    return found.shard is None or len(_sound_rows(cache, found.shard)[1]) == found.shard.rows


def shard_bytes(root: Path) -> int:
    """The bytes of all files of a shard, as the disk has them now. Raises `FileNotFoundError`."""
    total = 0
    with os.scandir(root) as entries:
        for entry in entries:
            total += shard_bytes(Path(entry.path)) if entry.is_dir() else entry.stat().st_size
    return total


def _sound_rows(cache: Cache, shard: Shard) -> tuple[Column, Column]:
    """Keys (S32) and numbers of a shard's rows that are to be trusted; none when the shard is missing or torn."""
    damages = recorded(cache, shard.digest)
    try:
        if any(damage.row is None for damage in damages) or shard_bytes(cache.shard(shard.digest)) != shard.bytes:
            return np.empty(0, "S32"), np.empty(0, np.int32)
        keys = read_keys(cache, shard.digest)
    except (CacheError, OSError):
        return np.empty(0, "S32"), np.empty(0, np.int32)
    bad = {damage.row for damage in damages}
    rows = np.arange(len(keys), dtype=np.int32)
    rows = rows[[row not in bad for row in range(len(keys))]] if bad else rows
    return np.ascontiguousarray(keys[rows]).view("S32").reshape(-1), rows


def _ledger(
    columns: Columns, present: Sequence[tuple[Shard, str]], rejects: Mapping[str, Reject], commits: frozenset[str]
) -> Ledger:
    names = list(rejects)
    made = locate(columns, packed(names), len(present)).there.tolist()  # after all, by another task
    return Ledger(
        keys=columns.keys, shard=columns.shard, row=columns.row, shards=tuple(shard for shard, _ in present),
        fields=tuple(field for _, field in present), commits=commits,
        rejects={key: rejects[key] for key, there in zip(names, made, strict=True) if not there},
    )
