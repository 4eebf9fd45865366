"""Stores plans: the tasks of an unfinished encoding job, one Arrow stream named by the digest of all wanted keys.

Plans are created if absent: later runs with the same wanted keys follow the stored plan, so the division into tasks
never shifts. A plan is disposable; a damaged plan is made again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from prep.cache.arrow import check_stream, parse_table
from prep.cache.records import Task
from prep.cache.shard_format import checked_name
from prep.cache.store import SUFFIX, Cache
from prep.fs.remote.objects import list_objects
from prep.fs.untrusted import NotRegularFile
from prep.parse import Unparsed, brief, digest_of

DIGEST = pa.binary(32)
SCHEMA = pa.schema({"task": DIGEST, "field": pa.string(), "rows": pa.list_(DIGEST)})
MOST = 1 << 34  # bytes; 10^8 rows take 4 GB
OLD = 86400.0  # seconds after which a plan is written again by who follows it
TRAILER = 32  # bytes of SHA-256 after the stream, because a plan is not named by its bytes


def write_plan(cache: Cache, wanted: str, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Returns the plan to follow for the keys with digest `wanted`: the stored plan, or `tasks`, which it stores."""
    target = cache.plan(wanted)
    if cache.create(target, _encode(tasks)):
        return tuple(tasks)
    stored = read_plan(cache, wanted)
    if stored is None:
        cache.replace(target, _encode(tasks))
        return tuple(tasks)
    return stored


def read_plan(cache: Cache, wanted: str) -> tuple[Task, ...] | None:
    """The stored plan; None if it is missing or damaged. The caller checks which rows it has."""
    try:
        data = cache.read(cache.plan(wanted), MOST)
        body, trailer = memoryview(data)[:-TRAILER], data[-TRAILER:]
        if hashlib.sha256(body).digest() != trailer:
            return None
        if check_stream(body) != len(body):
            raise Unparsed("it has data after its end")
        return tuple(_task(row) for row in parse_table(body, SCHEMA).to_pylist())
    except (FileNotFoundError, NotRegularFile, Unparsed):
        return None


def plans_of(cache: Cache) -> dict[str, float]:
    """When each plan was written, seconds since 1970, by its digest: in the store, if this is a working copy."""
    found, end = dict[str, float](), SUFFIX["plans"]
    if cache.url is None:
        for name in cache.names("plans"):
            with suppress(FileNotFoundError):  # sealed meanwhile
                found[name] = cache.plan(name).stat().st_mtime
        return found
    for name, listed in list_objects(f"{cache.url}/plans").items():
        with suppress(Unparsed):
            if name.endswith(end):
                found[digest_of(PurePosixPath(name).name.removesuffix(end), "plans")] = listed.written
    return found


def renew_plan(cache: Cache, wanted: str) -> None:
    """Makes a stored plan that a run begins to follow as young as the run, for `prep gc`: until its first commit,
    nothing else shows that the plan is not abandoned. In a store only if it is old: it may be large, with many parts.
    """
    path = cache.plan(wanted)
    if cache.url is None:
        with suppress(OSError):  # another user's
            os.utime(path)
    elif time.time() - plans_of(cache).get(wanted, time.time()) > OLD:
        with suppress(FileNotFoundError):  # sealed meanwhile
            cache.replace(path, cache.read(path, MOST))


def _task(row: Mapping[str, Any]) -> Task:
    """One task of a plan. Raises `Unparsed` for nulls, no rows, and rows that are unsorted or repeated."""
    key, field, rows = row["task"], row["field"], row["rows"]
    if key is None or not rows or None in rows or any(first >= second for first, second in pairwise(rows)):
        raise Unparsed(f"a task has {brief(rows)}, expected keys in ascending order")
    return Task(key=key.hex(), field=checked_name(field, "field"), rows=tuple(one.hex() for one in rows))


def remove_plan(cache: Cache, wanted: str) -> None:
    """Removes the plan, if it exists."""
    cache.discard(cache.plan(wanted))


def _encode(tasks: Sequence[Task]) -> bytes:
    """The stream and its digest. Column by column: a million rows as Python objects would take 150 MB meanwhile."""
    rows = b"".join(bytes.fromhex("".join(task.rows)) for task in tasks)
    ends = np.cumsum([0, *(len(task.rows) for task in tasks)], dtype=np.int32)
    columns = [_digests(b"".join(bytes.fromhex(task.key) for task in tasks)),
               pa.array([task.field for task in tasks], pa.string()),
               pa.ListArray.from_arrays(pa.array(ends), _digests(rows))]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    body = memoryview(sink.getvalue())
    return b"".join([body, hashlib.sha256(body).digest()])


def _digests(data: bytes) -> pa.Array:
    """Concatenated digests as an array."""
    return pa.Array.from_buffers(DIGEST, len(data) // 32, [None, pa.py_buffer(data)])
