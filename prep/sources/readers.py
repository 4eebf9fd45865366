"""Reads tables and tars in worker processes: an untrusted file may hang its parser, crash it or exhaust its memory.

A worker's limits grow with the size of the file: large honest files are read, and small hostile ones end soon.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from prep.findings import CODES
from prep.fs.blob import Blob, fetched
from prep.fs.remote.bucket import ListedUrl, is_object
from prep.fs.remote.objects import size_in, stream
from prep.fs.remote.retry import NEVER
from prep.parse import Unparsed
from prep.sources import table_files, tar_members
from prep.sources.table_files import TableMessage, TablePart
from prep.sources.tar_index import Said, TarMember, lands_outside
from prep.sources.tar_members import MOST_HEADER, TarMessage, TarPart
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import Limits, Service, Task

SECONDS = 60.0  # for every file; more is added by size
TABLE_RATE, TAR_RATE = 1 << 18, 1 << 22  # bytes per second; a twentieth of the speeds measured, from a disk
TABLE_MEMORY, TAR_MEMORY = 3 << 29, 1 << 30  # bytes of address space for every file; Arrow's libraries map 0.5 GiB
TABLE_CODES = {"bad-table", "unreadable-file", "too-large", "special-file"}
PARSED = 16  # bytes of memory for each byte of a table: a JSON table takes ten


def _read_table(message: TableMessage) -> Iterator[TablePart]:
    return table_files.read_parts(message.blob())


def _read_tar(message: TarMessage) -> Iterator[TarPart]:
    return tar_members.read_parts(message)


TABLE = Task(name="table", question=TableMessage, part=TablePart, work=_read_table)
TAR = Task(name="tar", question=TarMessage, part=TarPart, work=_read_tar)
SERVICE = Service(module=__name__, tasks=(TABLE, TAR))


def readers() -> WorkerPool:
    """A pool of workers that read tables and tars; it starts none before the first file."""
    return WorkerPool(SERVICE)


def read_table(workers: WorkerPool, table: Blob) -> list[TablePart]:
    """The rows of a table. Raises `WorkerLost`, also if the worker's answer has an impossible finding code,
    `StoreError`, and `Stopped` if the pool is closed meanwhile."""
    content = fetched(table, stop=workers.closed)
    if content.fault is not None:
        return [TablePart([], ending=table_files.unreadable(content.fault))]
    size = _size(table.path) if content.data is None else len(content.data)
    limits = Limits(seconds=SECONDS + size / TABLE_RATE, memory=TABLE_MEMORY + PARSED * size)
    parts = workers.ask(TABLE, TableMessage.of(content), limits)
    if not {part.ending[0] for part in parts if part.ending is not None} <= TABLE_CODES:
        raise WorkerLost("crash", "with an invalid answer: a finding's code is not one of a table")
    return parts


def read_tar(workers: WorkerPool, tar: Blob) -> list[TarMember | Said]:
    """The usable members of a tar, and findings on the tar, in the worker's order.

    For a tar in a store, this reads the headers, and a worker parses them. Raises `StoreError`; `WorkerLost`, also for
    members outside the tar's bytes, or that would be unpacked outside their directory: a worker that lists such members
    has been taken over.
    """
    if is_object(tar.file):
        size = size_in(tar.version)
        try:
            message = TarMessage(os.fsencode(tar.file), size, headers_of(tar.file, size, stop=workers.closed))
        except OSError as error:  # it is gone, or a shorter one has replaced it
            return [Said(name="", code="unreadable-file", detail=f"cannot be read: {error.strerror}")]
    else:
        message, size = TarMessage(os.fsencode(tar.file)), _size(tar.path)
    parts = workers.ask(TAR, message, Limits(seconds=SECONDS + size / TAR_RATE, memory=TAR_MEMORY))
    size = size if is_object(tar.file) else _size(tar.path)
    try:
        return [entry for part in parts for entry in _checked(part, size)]
    except Unparsed as error:
        raise WorkerLost("crash", f"with an invalid answer: {error}") from None


def lost_detail(lost: WorkerLost) -> str:
    """The detail of the finding on a table or a tar whose worker was lost."""
    return {"slow": f"reading it took {lost.detail}", "memory": f"reading it took {lost.detail}",
            "closed": "the command ended before it was read", "crash": f"its reader ended {lost.detail}"}[lost.cause]


def _checked(part: TarPart, size: int) -> Iterator[TarMember | Said]:
    for raw, offset, length in part.members:
        name = raw.decode("utf-8", "surrogateescape")
        if length < 0 or not 0 <= offset <= size - length:
            raise Unparsed("a member lies outside the tar")
        if lands_outside(name):
            raise Unparsed("a member would be unpacked outside its directory")
        yield TarMember(name=name, offset=offset, size=length)
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


# ---- a tar in a store ------------------------------------------------------------------------------------------------

SKIP = 1 << 21  # bytes between headers from which another request is quicker than reading on
_BLOCK = 512
_NO_DATA = b"123456"  # kinds of members, such as links and directories, whose size says nothing
_LONG = b"xgLK"  # kinds of headers that go on in what would be data
_SIZE = re.compile(rb"\d+ size=(\d{1,20})\n")


def headers_of(url: str, size: int, *, stop: threading.Event = NEVER) -> list[tuple[int, bytes]]:
    """Returns the pieces of a tar in a store that its listing needs, and where each begins; the last is where it ends.

    Reads on through members below `SKIP`, and asks again beyond larger ones. It follows sizes alone: a worker parses
    the headers, and finds it if one of them leads elsewhere. Raises `FileNotFoundError`, `StoreError`, `Stopped`.
    """
    reader, at = _Through(url, size, stop), 0
    pieces: list[tuple[int, bytes]] = []
    replaced: int | None = None  # the size in a header that goes before the member's own
    while len(header := reader.read(at, _BLOCK)) == _BLOCK and any(header):
        kind, length = header[156:157], _number(header[124:136])
        if kind in _LONG and length is not None and length <= MOST_HEADER:
            data = reader.read(at + _BLOCK, length + -length % _BLOCK)  # `tarfile` looks at all of it
            if kind == b"x" and (named := _SIZE.search(data)):
                replaced = int(named[1])
            pieces.append((at, header + data))
        else:
            pieces.append((at, header))
            length, replaced = length if replaced is None else replaced, None
        if length is None or at + _BLOCK + length > size:
            break
        folder = kind == b"\0" and header[:100].partition(b"\0")[0].endswith(b"/")
        at += _BLOCK + (0 if kind in _NO_DATA or folder else length + -length % _BLOCK)
    else:
        pieces.append((at, header))
    reader.close()
    return pieces


def _number(field: bytes) -> int | None:
    """Returns a number of a header, written in octal or in base 256; `None` for anything else."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return None


class _Through:
    """Reads an object from its beginning to its end, at places that only go up."""

    def __init__(self, url: str, size: int, stop: threading.Event) -> None:
        self._url, self._size, self._stop = ListedUrl(url), size, stop
        self._at = 0  # of the first byte in hand
        self._held = b""
        self._parts: Iterator[Any] = iter(())

    def read(self, start: int, length: int) -> bytes:
        """The bytes at a place; fewer at the end."""
        end = min(start + length, self._size)
        if start > self._at + len(self._held) + SKIP or self._at == 0 == len(self._held):
            self.close()
            self._parts, self._at, self._held = stream(self._url, self._size, start=start, stop=self._stop), start, b""
        while self._at + len(self._held) < end:
            part = next(self._parts, None)
            if part is None:
                break
            keep = max(0, min(start - self._at, len(self._held)))
            self._at, self._held = self._at + keep, self._held[keep:] + bytes(part)
        first = start - self._at
        return self._held[first : max(first, end - self._at)]

    def close(self) -> None:
        """Ends the request under way."""
        if isinstance(self._parts, Generator):
            self._parts.close()
