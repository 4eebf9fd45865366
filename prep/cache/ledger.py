"""Which keys the cache has, and where: read from commits and the shards they name.

Counted as missing: a commit without its shard, a shard of the wrong size or without sound keys, rows named under
damaged/. So whatever is missing is simply encoded again. Holds 40 bytes a row, no string of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prep.cache import files
from prep.cache.damage import recorded
from prep.cache.header import read_keys
from prep.cache.layout import Shard
from prep.cache.store import Cache
from prep.digest import canonical, seal
from prep.errors import CacheError
from prep.parse import Unparsed, digest_of, expect, list_of, sealed_json
from prep.records import Reject, RowRef, Task

Column = np.ndarray[Any, Any]
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What a finished task left."""

    task: str
    field: str
    shard: Shard | None  # None: every row was rejected
    rejects: tuple[Reject, ...]
    provenance: Mapping[str, Any]  # host, device, versions, milliseconds


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
        keys = np.frombuffer(bytes.fromhex("".join(names)), dtype="S32")
        first, past = np.searchsorted(self.keys, keys, "left"), np.searchsorted(self.keys, keys, "right")
        places = _spans(first, past)
        counts = np.bincount(self.shard[places], minlength=len(self.shards))
        rank = np.empty(len(self.shards), dtype=np.int64)
        rank[np.lexsort((np.arange(len(counts)), -counts))] = np.arange(len(counts))
        found = {}
        for name, start, end in zip(names, first.tolist(), past.tolist(), strict=True):
            if start < end:
                best = start if end - start == 1 else start + int(np.argmin(rank[self.shard[start:end]]))
                found[name] = RowRef(shard=self.shards[self.shard[best]].digest, row=int(self.row[best]))
        return found


def empty() -> Ledger:
    """The ledger of a cache that is not there yet."""
    return _ledger([], [], {}, frozenset())


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
            columns.append((keys, np.full(len(rows), len(present), np.int32), rows))
            present.append(shards[digest])
        if len(rows) == shards[digest][0].rows:
            whole.add(digest)
    return _ledger(columns, present, rejects, frozenset(
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
        "rejects": [{"key": reject.key, "code": reject.code, "detail": reject.detail} for reject in rejects],
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


def read_commit(cache: Cache, task: str) -> Commit | None:
    """The commit of a task, or None when it has none or a damaged one. Raises `CacheError` for another version."""
    path = cache.commit(task)
    try:
        document = sealed_json(path.read_bytes(), "commit")
    except (FileNotFoundError, Unparsed):
        return None
    if (document.get("format"), document.get("version")) != ("latentry/commit", VERSION):
        raise CacheError(f"{path} is {document.get('format')!r} version {document.get('version')!r}, "
                         f"expected 'latentry/commit' version {VERSION}")
    try:
        parsed = _parse(document)
    except Unparsed:
        return None
    return parsed if parsed.task == task else None


def shard_bytes(root: Path) -> int:
    """The bytes of all files of a shard, as the disk has them now. Raises `FileNotFoundError`."""
    total = 0
    with os.scandir(root) as entries:
        for entry in entries:
            total += shard_bytes(Path(entry.path)) if entry.is_dir() else entry.stat().st_size
    return total


def _parse(document: Mapping[str, Any]) -> Commit:
    shard = None
    if document.get("shard") is not None:
        rows, size = (expect(document.get(name), int, name) for name in ("rows", "bytes"))
        shard = Shard(digest=digest_of(document["shard"], "shard"), rows=rows, bytes=size)
    known = {"format", "version", "task", "field", "shard", "rows", "bytes", "rejects", "self"}
    return Commit(
        task=digest_of(document.get("task"), "task"), field=expect(document.get("field"), str, "field"), shard=shard,
        rejects=tuple(list_of(document.get("rejects"), _reject, "rejects")),
        provenance={key: value for key, value in document.items() if key not in known},
    )


def _reject(value: Any, where: str) -> Reject:
    table = expect(value, dict, where)
    code, detail = (expect(table.get(name), str, f"{where}.{name}") for name in ("code", "detail"))
    return Reject(key=digest_of(table.get("key"), f"{where}.key"), code=code, detail=detail)


def _sound_rows(cache: Cache, shard: Shard) -> tuple[Column, Column]:
    """Keys (S32) and numbers of a shard's rows that are to be trusted; none when the shard is missing or torn."""
    damages = recorded(cache, shard.digest)
    try:
        if any(damage.row is None for damage in damages) or shard_bytes(cache.shard(shard.digest)) != shard.bytes:
            return np.empty(0, "S32"), np.empty(0, np.int32)
        keys = read_keys(cache, shard.digest)
    except (CacheError, OSError):
        return np.empty(0, "S32"), np.empty(0, np.int32)
    bad = [damage.row for damage in damages if damage.row is not None]
    rows = np.setdiff1d(np.arange(len(keys), dtype=np.int32), np.asarray(bad, np.int32))
    return np.ascontiguousarray(keys[rows]).view("S32").reshape(-1), rows


def _ledger(
    columns: list[tuple[Column, Column, Column]], present: list[tuple[Shard, str]], rejects: dict[str, Reject],
    commits: frozenset[str],
) -> Ledger:
    empty = (np.empty(0, "S32"), np.empty(0, np.int32), np.empty(0, np.int32))
    keys, shard, row = (np.concatenate(parts) for parts in zip(empty, *columns, strict=True))
    order = np.lexsort((shard, keys))
    there = {bytes(key).ljust(32, b"\0").hex() for key in keys[np.isin(keys, _packed(rejects))]}
    return Ledger(
        keys=keys[order], shard=shard[order], row=row[order], shards=tuple(shard for shard, _ in present),
        fields=tuple(field for _, field in present), commits=commits,
        rejects={key: reject for key, reject in rejects.items() if key not in there},
    )


def _packed(keys: Iterable[str]) -> Column:
    return np.frombuffer(bytes.fromhex("".join(keys)), dtype="S32")


def _spans(first: Column, past: Column) -> Column:
    """All integers in the half-open spans, one span after another."""
    counts = past - first
    starts = np.repeat(first - np.cumsum(counts) + counts, counts)
    return starts + np.arange(counts.sum())
