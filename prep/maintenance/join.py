"""Joins small shards into larger ones: rows and keys stay unchanged; gc removes the small shards later.

A shard is small if it has less than half of the rows that fit a shard of the wanted size. The rows of small shards that
no larger shard has are sorted by key and split into even parts, none of them small if there are two or more: so a
second call has nothing to do, and after an interruption only missing parts are made. Memory: 40 bytes per row for the
ledger, and one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from prep.arrays import ArraySpec
from prep.cache.commits import read_commit
from prep.cache.ledger.columns import Column
from prep.cache.ledger.ledger import Ledger, write_commit
from prep.cache.reader import Reader
from prep.cache.records import Reject, Shard, Task
from prep.cache.shard_check import verify_shard
from prep.cache.shard_format import ENTRY_BYTES, KEY_BYTES, row_stride
from prep.cache.shard_header import Header, read_header
from prep.cache.store import Cache
from prep.cache.writer import ShardWriter
from prep.digest import digest_json
from prep.errors import CacheError
from prep.progress import Tick

DOCUMENTS = 4096  # bytes reserved for the documents of a shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows that will become one shard."""

    field: str
    arrays: tuple[ArraySpec, ...]
    first: Column  # int64 [N]: where each row's places begin in the ledger's columns, by key
    past: Column  # int64 [N]: and where they end
    sources: tuple[str, ...]  # digests of all small shards with any of the rows, sorted

    @property
    def row_bytes(self) -> int:
        """Bytes per row in a shard."""
        return _row_bytes(self.arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class LostRow:
    """A row that is damaged in every shard that has it."""

    field: str
    key: str
    places: tuple[tuple[str, int], ...]  # (shard, row)


def plan_joins(cache: Cache, ledger: Ledger, *, shard_bytes: int) -> list[Part]:
    """The joins to do, by field, shapes and key. Skips shards whose header cannot be read."""
    headers = _small(cache, ledger, shard_bytes)
    groups: dict[tuple[str, tuple[ArraySpec, ...]], list[int]] = {}
    for number, header in sorted(headers.items()):
        groups.setdefault((header.field, header.arrays), []).append(number)
    starts = np.flatnonzero(np.append(True, ledger.keys[1:] != ledger.keys[:-1])[: len(ledger.keys)])
    ends = np.append(starts[1:], len(ledger.keys)).astype(np.int64)
    parts: list[Part] = []
    for (field, arrays), numbers in sorted(groups.items(), key=lambda group: (group[0][0], str(group[0][1]))):
        mine = np.zeros(len(ledger.shards), bool)
        mine[numbers] = True
        only = np.logical_and.reduceat(mine[ledger.shard], starts)  # rows that no other shard has
        parts += _cut(ledger, field, arrays, starts[only], ends[only], _most(arrays, shard_bytes))
    return parts


def sources_of(parts: Iterable[Part]) -> list[str]:
    """The small shards with rows of these parts, sorted."""
    return sorted({source for part in parts for source in part.sources})


def unverifiable(cache: Cache, sources: Sequence[str], tick: Tick = lambda _: None) -> frozenset[str]:
    """The shards with damage that no checksum locates: their bytes do not match their digests.

    Their rows may match their checksums and still belong to another shard; a copy would be trusted forever. Damage is
    recorded. Calls `tick(1)` for each shard.
    """
    doubtful = set()
    for source in sources:
        if any(damage.array is None for damage in verify_shard(cache, source)):
            doubtful.add(source)
        tick(1)
    return frozenset(doubtful)


def join(cache: Cache, source_cache: Cache, ledger: Ledger, part: Part, rejects: Sequence[Reject], tick: Tick,
         shunned: Collection[str] = ()) -> tuple[Shard | None, list[LostRow]]:
    """Writes the shard of a part and its commit, which contains `rejects`; checks the checksum of each row it copies
    from `source_cache`, which has the small shards.

    A row that is damaged in one shard, or that is in a `shunned` shard, is copied from another; a row that is damaged
    everywhere is recorded as damaged and dropped. Returns None for the shard if all rows are dropped. Calls `tick(1)`
    for each row.
    """
    keys: list[str] = []
    lost: list[LostRow] = []
    values = {spec.name: np.empty(spec.row_bytes, np.uint8) for spec in part.arrays}
    with ShardWriter(cache, part.field, part.arrays) as writer:
        reader = Reader(source_cache)
        for key, places in _places(ledger, part):
            if any(place[0] not in shunned and _read(reader, place, values) for place in places):
                writer.add(key, {name: value.data for name, value in values.items()})
                keys.append(key)
            else:
                lost.append(LostRow(field=part.field, key=key, places=places))
            tick(1)
        reader.close()
        shard = writer.finish() if keys else None
    if shard is not None:
        task = Task(key=digest_json({"kind": "compact", "meaning": 1, "field": part.field, "rows": keys}),
                    field=part.field, rows=tuple(keys))
        write_commit(cache, task, shard, rejects, {"compacted": len(part.sources)})
    return shard, lost


def rejects_by_shard(cache: Cache) -> dict[str, tuple[Reject, ...]]:
    """The rejected rows in commits, by the shard of the same commit: they would be lost with it unless copied."""
    rejects: dict[str, tuple[Reject, ...]] = {}
    for task in cache.names("commits"):
        commit = read_commit(cache, task)
        if commit is not None and commit.shard is not None and commit.rejects:
            rejects[commit.shard.digest] = rejects.get(commit.shard.digest, ()) + commit.rejects
    return rejects


def _small(cache: Cache, ledger: Ledger, shard_bytes: int) -> dict[int, Header]:
    """The headers of small shards, by shard number in the ledger."""
    headers = {}
    for number, shard in enumerate(ledger.shards):
        if shard.bytes < shard_bytes // 2:
            try:
                header = read_header(cache, shard.digest)
            except CacheError:
                continue
            if 2 * shard.rows < _most(header.arrays, shard_bytes):
                headers[number] = header
    return headers


def _cut(ledger: Ledger, field: str, arrays: tuple[ArraySpec, ...], first: Column, past: Column,
         most: int) -> Iterator[Part]:
    """Even parts of at most `most` rows; skips a part that is exactly the rows of an existing shard."""
    count = -(-len(first) // most)
    whole = np.bincount(_shards(ledger, first, past), minlength=len(ledger.shards))
    edges = (np.arange(count + 1) * len(first) // max(count, 1)).tolist()
    for start, end in pairwise(edges):
        inside = np.bincount(_shards(ledger, first[start:end], past[start:end]), minlength=len(ledger.shards))
        if not ((inside == end - start) & (inside == whole)).any():
            sources = tuple(ledger.shards[number].digest for number in np.flatnonzero(inside))
            yield Part(field=field, arrays=arrays, first=first[start:end], past=past[start:end], sources=sources)


def _shards(ledger: Ledger, first: Column, past: Column) -> Column:
    """The shard numbers at all places in the spans, one span after another."""
    shards: Column = ledger.shard[_spread(first, past)]
    return shards


def _spread(first: Column, past: Column) -> Column:
    """All numbers in the spans, one span after another."""
    counts = past - first
    places: Column = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return places


def _places(ledger: Ledger, part: Part) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
    """Each row's key and places, sorted by key."""
    for start, end in zip(part.first.tolist(), part.past.tolist(), strict=True):
        key = bytes(ledger.keys[start]).ljust(KEY_BYTES, b"\0").hex()
        yield key, tuple((ledger.shards[shard].digest, row) for shard, row in
                         zip(ledger.shard[start:end].tolist(), ledger.row[start:end].tolist(), strict=True))


def _read(reader: Reader, place: tuple[str, int], values: dict[str, Any]) -> bool:
    """Reads all arrays of a row into `values`; False if one is damaged, which the reader records."""
    try:
        for name, value in values.items():
            reader.read_into(value, place[0], name, place[1])
    except CacheError:
        return False
    return True


def _row_bytes(arrays: Sequence[ArraySpec]) -> int:
    return KEY_BYTES + sum(row_stride(spec) + ENTRY_BYTES for spec in arrays)


def _most(arrays: Sequence[ArraySpec], shard_bytes: int) -> int:
    """How many rows fit a shard of that size."""
    return max(1, (shard_bytes - DOCUMENTS) // _row_bytes(arrays))
