"""Stores plans: the tasks of an unfinished encoding job, one Arrow stream named by the digest of all wanted keys.

Plans are created if absent: later runs with the same wanted keys follow the stored plan, so the division into tasks
never shifts. A plan is disposable; a damaged plan is made again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa

from prep.cache.arrow import check_stream, digests_of, parse_table
from prep.cache.ledger.columns import Column, packed, unpacked
from prep.cache.records import Task
from prep.cache.shard_format import checked_name
from prep.cache.store import SUFFIX, Cache
from prep.fs.remote.objects import list_objects
from prep.fs.untrusted import NotRegularFile
from prep.parse import Unparsed, digest_of

DIGEST = pa.binary(32)
SCHEMA = pa.schema({"task": DIGEST, "field": pa.string(), "rows": pa.list_(DIGEST)})
MOST = 1 << 34  # bytes; 10^8 rows take 4 GB
OLD = 86400.0  # seconds after which a plan is written again by who follows it
TRAILER = 32  # bytes of SHA-256 after the stream, because a plan is not named by its bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredPlan:
    """The tasks of a stored plan, made one after another. A million rows take 35 MB as columns, as tasks 150."""

    task: Column  # S32 [T]: keys of the tasks
    field: tuple[str, ...]  # T of them
    ends: Column  # int64 [T]: of rows, where those of a task end
    row: Column  # S32: keys of the rows, task after task; those of a task ascend

    def task_keys(self) -> Iterator[str]:
        """The keys of its tasks."""
        return iter(unpacked(self.task))

    def __iter__(self) -> Iterator[Task]:
        start = 0
        for key, field, end in zip(self.task_keys(), self.field, self.ends.tolist(), strict=True):
            yield Task(key=key, field=field, rows=tuple(unpacked(self.row[start:end])))
            start = end


def write_plan(cache: Cache, wanted: str, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Returns the plan to follow for the keys with digest `wanted`: the stored plan, or `tasks`, which it stores."""
    target = cache.plan(wanted)
    if cache.create(target, _encode(tasks)):
        return tuple(tasks)
    stored = read_plan(cache, wanted)
    if stored is None:
        cache.replace(target, _encode(tasks))
        return tuple(tasks)
    return tuple(stored)


def read_plan(cache: Cache, wanted: str) -> StoredPlan | None:
    """The stored plan; None if it is missing or damaged. The caller checks which rows it has."""
    try:
        data = cache.read(cache.plan(wanted), MOST)
        body, trailer = memoryview(data)[:-TRAILER], data[-TRAILER:]
        if hashlib.sha256(body).digest() != trailer:
            return None
        if check_stream(body) != len(body):
            raise Unparsed("it has data after its end")
        return _parse(parse_table(body, SCHEMA).combine_chunks())
    except (FileNotFoundError, NotRegularFile, Unparsed):
        return None


def plans_of(cache: Cache) -> dict[str, float]:
    """When each plan was written, seconds since 1970, by its digest, where the cache is."""
    times, end = dict[str, float](), SUFFIX["plans"]
    if cache.store is None:
        for name in cache.names("plans"):
            with suppress(FileNotFoundError):  # sealed meanwhile
                times[name] = cache.plan(name).stat().st_mtime
        return times
    for name, listed in list_objects(f"{cache.store}/plans").items():
        with suppress(Unparsed):
            if name.endswith(end):
                times[digest_of(PurePosixPath(name).name.removesuffix(end), "plans")] = listed.written
    return times


def renew_plan(cache: Cache, wanted: str) -> None:
    """Makes a stored plan that a run begins to follow as young as the run, for `prep gc`: until its first commit,
    nothing else shows that the plan is not abandoned. In a store only if it is old: it may be large, with many parts.
    """
    path = cache.plan(wanted)
    if cache.store is None:
        with suppress(OSError):  # another user's
            os.utime(path)
    elif time.time() - plans_of(cache).get(wanted, time.time()) > OLD:
        with suppress(FileNotFoundError):  # sealed meanwhile
            cache.replace(path, cache.read(path, MOST))


def _parse(table: pa.Table) -> StoredPlan:
    """The plan in a table. Raises `Unparsed` for nulls, tasks without rows, and rows that are unsorted or repeated."""
    task, field, lists = (_array(column) for column in table.columns)
    rows, ends = lists.flatten(), np.cumsum(np.diff(lists.offsets.to_numpy()), dtype=np.int64)
    if task.null_count or lists.null_count or rows.null_count or not _ascend(digests_of(rows), ends):
        raise Unparsed("a task has nulls, no rows, or rows that do not ascend, expected keys in ascending order")
    fields = field.to_pylist()
    checked = {name: checked_name(name, "field") for name in set(fields)}
    return StoredPlan(task=digests_of(task), field=tuple(map(checked.__getitem__, fields)), ends=ends,
                      row=digests_of(rows))


def _ascend(row: Column, ends: Column) -> bool:
    """Whether every task, up to its end, has rows, and they ascend."""
    rising = np.append(row[1:] > row[:-1], True)
    rising[ends - 1] = True  # after the last row of a task comes another's
    return bool((np.diff(ends, prepend=0) > 0).all() and rising.all())


def _array(column: pa.ChunkedArray) -> pa.Array:
    """The values of a column whose chunks are combined."""
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def remove_plan(cache: Cache, wanted: str) -> None:
    """Removes the plan, if it exists."""
    cache.discard(cache.plan(wanted))


def _encode(tasks: Sequence[Task]) -> bytes:
    """The stream and its digest. Column by column: a million rows as Python objects would take 150 MB meanwhile."""
    ends = np.cumsum([0, *(len(task.rows) for task in tasks)], dtype=np.int32)
    columns = [_digests(packed(task.key for task in tasks)), pa.array([task.field for task in tasks], pa.string()),
               pa.ListArray.from_arrays(pa.array(ends), _digests(packed(key for task in tasks for key in task.rows)))]
    sink = BytesIO()  # its bytes are handed over without a copy, even with the digest after them
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    sink.write(hashlib.sha256(sink.getbuffer()).digest())
    return sink.getvalue()


def _digests(keys: Column) -> pa.Array:
    """Keys as an array."""
    return pa.Array.from_buffers(DIGEST, len(keys), [None, pa.py_buffer(keys)])
