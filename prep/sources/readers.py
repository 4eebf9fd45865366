"""Tables and tars read by worker processes: a file of a stranger may hang, crash or fill whoever parses it.

What a worker may take grows with the size of the file, so that large files of good will are read, and small ones of
ill will end soon.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prep.findings import CODES
from prep.parse import Unparsed
from prep.sources import table_files, tar_members
from prep.sources.table_files import TablePart
from prep.sources.tar_index import Member, Said, lands_outside
from prep.sources.tar_members import TarPart
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import Limits, Service, Task

SECONDS = 60.0  # for any file, and more by its size
TABLE_RATE, TAR_RATE = 1 << 18, 1 << 22  # bytes a second; both are read twenty times as fast here, from a disk
TABLE_MEMORY, TAR_MEMORY = 3 << 29, 1 << 30  # bytes of address space for any file; Arrow's libraries map 0.5 GiB
TABLE_CODES = {"bad-table", "unreadable-file", "too-large", "special-file"}
PARSED = 16  # bytes of memory for each byte of a table: a JSON table takes ten


def _read_table(path: bytes) -> Iterator[TablePart]:
    return table_files.read_parts(Path(os.fsdecode(path)))


def _read_tar(path: bytes) -> Iterator[TarPart]:
    return tar_members.read_parts(Path(os.fsdecode(path)))


TABLE = Task(name="table", question=bytes, part=TablePart, work=_read_table)
TAR = Task(name="tar", question=bytes, part=TarPart, work=_read_tar)
SERVICE = Service(module=__name__, tasks=(TABLE, TAR))


def readers() -> WorkerPool:
    """A pool of workers that read tables and tars; none is started before there is one to read."""
    return WorkerPool(SERVICE)


def read_table(workers: WorkerPool, path: Path) -> list[TablePart]:
    """The rows of a table. Raises `WorkerLost`, also where a worker answers what none of ours would."""
    size = _size(path)
    limits = Limits(seconds=SECONDS + size / TABLE_RATE, memory=TABLE_MEMORY + PARSED * size)
    parts = workers.ask(TABLE, os.fsencode(path), limits)
    if not {part.ending[0] for part in parts if part.ending is not None} <= TABLE_CODES:
        raise WorkerLost("crash", "with an invalid answer: a finding's code is not one of a table")
    return parts


def read_tar(workers: WorkerPool, path: Path) -> list[Member | Said]:
    """The members of a tar that can be used, and what is to be said of it, both in order.

    Raises `WorkerLost`, also where members lie outside of the tar or would land outside when unpacked: a worker that
    says so is no longer ours.
    """
    parts = workers.ask(TAR, os.fsencode(path), Limits(seconds=SECONDS + _size(path) / TAR_RATE, memory=TAR_MEMORY))
    size = _size(path)
    try:
        return [one for part in parts for one in _checked(part, size)]
    except Unparsed as error:
        raise WorkerLost("crash", f"with an invalid answer: {error}") from None


def lost_detail(lost: WorkerLost) -> str:
    """What is to be said of a table or a tar that no worker lived to read."""
    return {"slow": f"reading it took {lost.detail}", "memory": f"reading it took {lost.detail}",
            "closed": "the command ended before it was read", "crash": f"its reader ended {lost.detail}"}[lost.cause]


def _checked(part: TarPart, size: int) -> Iterator[Member | Said]:
    for raw, offset, length in part.members:
        name = raw.decode("utf-8", "surrogateescape")
        if length < 0 or not 0 <= offset <= size - length:
            raise Unparsed("a member lies outside the tar")
        if lands_outside(name):
            raise Unparsed("a member would land outside its directory")
        yield Member(name=name, offset=offset, size=length)
    for raw, code, detail in part.said:
        if code not in CODES:
            raise Unparsed(f"a finding has the unknown code {code[:80]!r}")
        yield Said(name=raw.decode("utf-8", "surrogateescape"), code=code, detail=detail)


def _size(path: Path) -> int:
    """The size of a file; 0 where there is none: the worker says so."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
