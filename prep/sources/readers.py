"""Reads tables and tars in worker processes: an untrusted file may hang its parser, crash it or exhaust its memory.

A worker's limits grow with the size of the file: large honest files are read, and small hostile ones end soon.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prep.findings import CODES
from prep.fs.blob import Blob, fetched
from prep.parse import Unparsed
from prep.sources import table_files, tar_members
from prep.sources.table_files import TableMessage, TablePart
from prep.sources.tar_index import Member, Said, lands_outside
from prep.sources.tar_members import TarPart
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import Limits, Service, Task

SECONDS = 60.0  # for every file; more is added by size
TABLE_RATE, TAR_RATE = 1 << 18, 1 << 22  # bytes per second; a twentieth of the speeds measured, from a disk
TABLE_MEMORY, TAR_MEMORY = 3 << 29, 1 << 30  # bytes of address space for every file; Arrow's libraries map 0.5 GiB
TABLE_CODES = {"bad-table", "unreadable-file", "too-large", "special-file"}
PARSED = 16  # bytes of memory for each byte of a table: a JSON table takes ten


def _read_table(asked: TableMessage) -> Iterator[TablePart]:
    return table_files.read_parts(asked.blob())


def _read_tar(path: bytes) -> Iterator[TarPart]:
    return tar_members.read_parts(Path(os.fsdecode(path)))


TABLE = Task(name="table", question=TableMessage, part=TablePart, work=_read_table)
TAR = Task(name="tar", question=bytes, part=TarPart, work=_read_tar)
SERVICE = Service(module=__name__, tasks=(TABLE, TAR))


def readers() -> WorkerPool:
    """A pool of workers that read tables and tars; it starts none before the first file."""
    return WorkerPool(SERVICE)


def read_table(workers: WorkerPool, table: Blob) -> list[TablePart]:
    """The rows of a table. Raises `WorkerLost`, also if the worker's answer has an impossible finding code, and
    `StoreError`."""
    held = fetched(table)
    if held.fault is not None:
        return [TablePart([], ending=table_files.unreadable(held.fault))]
    size = _size(table.path) if held.data is None else len(held.data)
    limits = Limits(seconds=SECONDS + size / TABLE_RATE, memory=TABLE_MEMORY + PARSED * size)
    parts = workers.ask(TABLE, TableMessage.of(held), limits)
    if not {part.ending[0] for part in parts if part.ending is not None} <= TABLE_CODES:
        raise WorkerLost("crash", "with an invalid answer: a finding's code is not one of a table")
    return parts


def read_tar(workers: WorkerPool, path: Path) -> list[Member | Said]:
    """The usable members of a tar, and findings on the tar, in the worker's order.

    Raises `WorkerLost`, also for members outside the tar's bytes, or that would be unpacked outside their directory: a
    worker that lists such members has been taken over.
    """
    parts = workers.ask(TAR, os.fsencode(path), Limits(seconds=SECONDS + _size(path) / TAR_RATE, memory=TAR_MEMORY))
    size = _size(path)
    try:
        return [one for part in parts for one in _checked(part, size)]
    except Unparsed as error:
        raise WorkerLost("crash", f"with an invalid answer: {error}") from None


def lost_detail(lost: WorkerLost) -> str:
    """The detail of the finding on a table or a tar whose worker was lost."""
    return {"slow": f"reading it took {lost.detail}", "memory": f"reading it took {lost.detail}",
            "closed": "the command ended before it was read", "crash": f"its reader ended {lost.detail}"}[lost.cause]


def _checked(part: TarPart, size: int) -> Iterator[Member | Said]:
    for raw, offset, length in part.members:
        name = raw.decode("utf-8", "surrogateescape")
        if length < 0 or not 0 <= offset <= size - length:
            raise Unparsed("a member lies outside the tar")
        if lands_outside(name):
            raise Unparsed("a member would be unpacked outside its directory")
        yield Member(name=name, offset=offset, size=length)
    for raw, code, detail in part.said:
        if code not in CODES:
            raise Unparsed(f"a finding has the unknown code {code[:80]!r}")
        yield Said(name=raw.decode("utf-8", "surrogateescape"), code=code, detail=detail)


def _size(path: Path) -> int:
    """The size of a file; 0 if it cannot be read, which the worker reports."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
