"""Plans: the tasks of an unfinished encoding job, one Arrow stream named by the digest of all wanted keys.

Create-if-absent: whoever comes later with the same wants follows the stored plan, so the cuts never shift. A plan is
disposable; a damaged one is made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import pyarrow as pa

from prep.cache import files
from prep.cache.store import Cache
from prep.records import Task

DIGEST = pa.binary(32)
SCHEMA = pa.schema({"task": DIGEST, "field": pa.string(), "rows": pa.list_(DIGEST)})
TRAILER = 32  # bytes of SHA-256 after the stream, since a plan is not named by its bytes


def write_plan(cache: Cache, wanted: str, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """The plan to follow for the keys digested as `wanted`: the one already stored, or else `tasks`."""
    target = cache.plan(wanted)
    files.make_dirs(target.parent)
    if files.write_new(target, _encode(tasks), staging=cache.staging()):
        return tuple(tasks)
    stored = read_plan(cache, wanted)
    if stored is None:
        files.write_whole(target, _encode(tasks), staging=cache.staging())
        return tuple(tasks)
    return stored


def read_plan(cache: Cache, wanted: str) -> tuple[Task, ...] | None:
    """The stored plan, or None when there is none or a damaged one."""
    try:
        data = cache.plan(wanted).read_bytes()
    except FileNotFoundError:
        return None
    body, trailer = data[:-TRAILER], data[-TRAILER:]
    if hashlib.sha256(body).digest() != trailer:  # before Arrow sees it: its reader trusts offsets
        return None
    table = pa.ipc.open_stream(body).read_all()
    if not table.schema.equals(SCHEMA):
        return None
    return tuple(
        Task(key=row["task"].hex(), field=row["field"], rows=tuple(key.hex() for key in row["rows"]))
        for row in table.to_pylist()
    )


def remove_plan(cache: Cache, wanted: str) -> None:
    """The plan is gone, there or not."""
    files.remove(cache.plan(wanted))


def _encode(tasks: Iterable[Task]) -> bytes:
    rows = [
        {"task": bytes.fromhex(task.key), "field": task.field, "rows": [bytes.fromhex(key) for key in task.rows]}
        for task in tasks
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    body: bytes = sink.getvalue().to_pybytes()
    return body + hashlib.sha256(body).digest()
