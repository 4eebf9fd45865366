"""Remembers what earlier runs read from files, so that the next run need not open them. Disposable.

Records are kept in SQLite files in a private directory of the user (`prep.fs.user_cache`) and nowhere else: a record
decides what a file is believed to hold, and a journal beside a database can name files that SQLite deletes. So a
directory that other users can write to is never used.

Each kind of memory has a version, which is part of its file's name: a program of another version, or with another
version of a decoder, starts with an empty memory and leaves the other file alone. Every record has a CRC-32 of its name
and value, which detects any single flipped bit; a damaged record counts as missing, and a damaged file is removed and
made again. Records unused for 90 days are removed; if a file, or all files together, get too large, the oldest are
removed first.

An object's stamp in a store is its version, as the listing has it, and what was read must have that version.

A file's stamp (device, inode, size, mtime, ctime) is trusted only if the file did not change for a minute before it
was read. File systems have clocks as coarse as two seconds. On Linux, a file that is written through a memory mapping
changes its times only once until its pages are written back, which takes up to 35 seconds
(vm.dirty_expire_centisecs and vm.dirty_writeback_centisecs). Where ctime is a creation time (Windows), a replaced file
can keep its whole stamp, so nothing is remembered there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import stat
import struct
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any
from zlib import crc32

from prep.fs.blob import Blob, fetched, read_blob
from prep.fs.remote.retry import NEVER
from prep.fs.stamps import blob_stamp, ctime_is_reliable
from prep.fs.user_cache import make_private, user_cache, why_not_private

FORMAT = 1  # of the files; raise it when their layout changes
FOLDER = "memory"  # in the user's cache directory
REST_NS = 60_000_000_000  # a stamp is trusted if the file did not change for this long before it was read
DAYS = 90  # after which an unused record is removed
REFRESH = 7  # days after which the date of last use of a record is updated
MOST_BYTES = 1 << 30  # of one file
MOST_IN_ALL = 1 << 31  # bytes of all files
FLUSH = 2000  # new records that are written in the middle of a run
WAIT = 1.0  # seconds to wait for another process that has locked the file
_DAY = 86400
_CRC = struct.Struct("<I")
_NUMBER = struct.Struct("<q")
_blake2b = hashlib.blake2b
_TABLE = "CREATE TABLE memory (id INTEGER PRIMARY KEY, day INTEGER NOT NULL, value BLOB NOT NULL)"
_SCHEMA = [(b"table", b"memory", _TABLE.encode())]
_HEAD = b"SQLite format 3\0"
_JOURNAL = slice(18, 20)  # of the header: 1, 1 means a rollback journal, the only kind used here
_PAGE = 16384  # bytes: thumbnails of 4 kB waste little of a page
_FILE = re.compile(r"(?P<kind>[a-z]+)-[0-9a-f]{16}\.sqlite(-journal|-wal|-shm)?")
# Errors that do not mean a damaged file: it is locked, or its disk or directory is at fault.
_ELSEWHERE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
              sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM}

_PARSE = json.JSONDecoder().raw_decode  # what `json.loads` calls internally; takes a third of the time

Fact = dict[str, Any]
_nothing_written = False


@contextmanager
def dry_run() -> Iterator[None]:
    """Inside, memories change nothing on the disk: they write no record or directory and remove no damaged file."""
    global _nothing_written
    before, _nothing_written = _nothing_written, True
    try:
        yield
    finally:
        _nothing_written = before


def memory_folder() -> Path | None:
    """The directory of all memories, which may not exist; `None` for a user without a home directory."""
    root = user_cache()
    return None if root is None else root / FOLDER


def memo_path(kind: str, version: str, *, scope: str = "") -> Path | None:
    """The file of a kind of memory, of this version and for this scope (a cache's path; "": global)."""
    folder = memory_folder()
    if folder is None:
        return None
    name = json.dumps([FORMAT, kind, version, scope]).encode("ascii")
    return folder / f"{kind}-{hashlib.blake2b(name, digest_size=8).hexdigest()}.sqlite"


class Memo:
    """Remembered records by name; thread-safe. `save` writes the new ones. A damaged or unusable file is no error.

    `trust=False` ignores existing records and remembers what is read now. Each is looked up on request (6 µs), unless
    `preload` has read all of them at once.
    """

    def __init__(self, path: Path | None, *, trust: bool = True) -> None:
        reliable = ctime_is_reliable()
        self._path = path if reliable else None
        self.trust = trust and reliable  # whether existing records are used
        self.read = 0  # files that had to be read
        self._new: dict[int, bytes] = {}
        self._used: list[int] = []  # records used by this run whose date of last use is old
        self._stale: set[int] = set()  # preloaded records whose date of last use is old
        self._flush = FLUSH
        self._today = int(time.time()) // _DAY
        self._lock = threading.RLock()
        self._checked = False  # whether every page of the file was checked
        self._connection: sqlite3.Connection | None = None
        self._loaded: _Loaded | None = None
        if self._path is not None and self.trust:
            self._connection = _open(self._path)

    def __reduce__(self) -> tuple[type[Memo], tuple[Path | None]]:
        """A copy for another process, which reads what was saved. It trusts all of it: this run has renewed it."""
        return Memo, (self._path,)

    def preload(self) -> None:
        """Reads all records at once (0.3 s for 300,000), for callers that need most of them."""
        if self._path is None or not self.trust or self._loaded is not None:
            return
        with self._lock:
            self._disconnect()
            self._loaded = _Loaded()
            with _disposable(self._path):
                if (connection := _connect(self._path, "ro")) is None:
                    return
                with closing(connection):
                    if _check(connection, every_page=True):
                        self._loaded = _Loaded(connection)
                        rows = connection.execute("SELECT id FROM memory WHERE day < ?", (self._today - REFRESH,))
                        self._stale = {number for number, in rows}
                        self._checked = True

    def release(self) -> None:
        """Lets go of what `preload` has read: from here on, each record is looked up on request."""
        with self._lock:
            if self._loaded is not None and self._path is not None:
                self._loaded, self._connection = None, _open(self._path)

    def recall(self, name: bytes) -> bytes | None:
        """The record of this name; `None` if it is missing or damaged."""
        if not self.trust:
            return None
        number = _number(name)
        value = self._new.get(number)
        if value is None:
            value = self._find(number) if self._loaded is None else self._loaded.get(number)
        if value is None or value[:4] != _CRC.pack(crc32(value[4:], crc32(name))):
            return None
        if self._stale and number in self._stale:
            self._stale.discard(number)
            self._used.append(number)
        return value[4:]

    def note(self, name: bytes, value: bytes) -> None:
        """Remembers a record."""
        number = _number(name)
        with self._lock:
            self._new[number] = _CRC.pack(crc32(value, crc32(name))) + value

    def flush(self) -> None:
        """Writes the new records once there are many."""
        if len(self._new) >= self._flush:
            self.save()

    def get_or_read(self, blob: Blob, kind: str, make: Callable[[bytes], Fact], *,
                    stop: threading.Event = NEVER) -> Fact:
        """The result of `make` for the blob's bytes, remembered if its file is unchanged. Raises `OSError`, and
        `Stopped` if `stop` is set while a store is waited for."""
        def read() -> tuple[Fact, Blob]:
            local = fetched(blob, stop=stop)
            return make(read_blob(local)), local

        return self._ask(blob, kind, read)

    def get_or_compute(self, path: Path, kind: str, make: Callable[[], Fact]) -> Fact:
        """The result of `make` for the file at `path`, remembered if the file is unchanged. Raises `OSError`."""
        blob = Blob(file=str(path))
        return self._ask(blob, kind, lambda: (make(), blob))

    def get(self, blob: Blob, kind: str) -> Fact | None:
        """What is remembered about `blob`, without reading it; `None` if there is no valid record. Raises `OSError`."""
        return self._recall_fact(kind, blob_stamp(blob)[0])

    def get_digest(self, kind: str, digest: str) -> bytes | None:
        """What is remembered about the content with this digest."""
        return self.recall(kind.encode() + b":" + bytes.fromhex(digest))

    def put_digest(self, kind: str, digest: str, value: bytes) -> None:
        """Remembers `value`, which must depend only on the content with this digest."""
        self.note(kind.encode() + b":" + bytes.fromhex(digest), value)

    def save(self) -> None:
        """Writes the new records, so that the next run need not read those files."""
        if self._path is None or _nothing_written or not (self._new or self._used):
            return
        with self._lock:
            self._flush *= 2  # so that a locked file or a full disk is not retried for every record
            for _ in range(2):  # once more if the file was damaged and has just been removed
                with _disposable(self._path):
                    make_private(self._path.parent)
                    self._write(self._path)
                if not (self._new or self._used) or os.path.lexists(self._path):
                    break
                self._disconnect()

    def close(self) -> None:
        """Writes the new records and closes the file."""
        self.save()
        with self._lock:
            self._disconnect()

    def _ask(self, blob: Blob, kind: str, make: Callable[[], tuple[Fact, Blob]]) -> Fact:
        begun = time.time_ns()
        before, changed = blob_stamp(blob)
        known = self._recall_fact(kind, before)
        if known is not None:
            return known
        value, seen = make()
        with self._lock:
            self.read += 1
        if blob_stamp(seen)[0] == before and is_at_rest(changed, begun):
            self.note(kind.encode() + b":" + before, json.dumps(value).encode())
        return value

    def _recall_fact(self, kind: str, stamp: bytes) -> Fact | None:
        value = self.recall(kind.encode() + b":" + stamp)
        return None if value is None else _PARSE(value.decode())[0]

    def _find(self, number: int) -> bytes | None:
        with self._lock:
            if self._connection is None:
                return None
            try:
                row = self._connection.execute("SELECT day, value FROM memory WHERE id = ?", (number,)).fetchone()
            except (sqlite3.Error, MemoryError, UnicodeDecodeError):
                self._disconnect()
                return None
        if row is None or type(row[1]) is not bytes:
            return None
        if row[0] < self._today - REFRESH:
            self._stale.add(number)
        return row[1]

    def _write(self, path: Path) -> None:
        new, used = dict(self._new), list(self._used)
        if (connection := _connect(path, "rwc")) is None:
            return
        with closing(connection):
            _prepare(connection, every_page=not self._checked)
            self._checked = True
            with connection:
                rows = ((number, self._today, value) for number, value in sorted(new.items()))  # fills pages better
                connection.executemany("INSERT OR REPLACE INTO memory VALUES (?, ?, ?)", rows)
                connection.executemany("UPDATE memory SET day = ? WHERE id = ?",
                                       ((self._today, number) for number in used))
                _forget(connection, self._today)
        if self._loaded is None and self._connection is None and self.trust:
            self._connection = _open(path)
        if self._loaded is not None:
            self._loaded.add(new)
        self._new, self._used, self._flush = {}, [], FLUSH
        _tidy(path.parent, keep=path)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Loaded:
    """All records of a file in columns: 16 bytes and the value for each, where a dict takes 150 more."""

    def __init__(self, connection: sqlite3.Connection | None = None) -> None:
        self._numbers, self._ends, self._values = array("q"), array("Q", [0]), bytearray()  # ascending by number
        self._added: dict[int, bytes] = {}
        if connection is None:
            return
        rows = connection.execute("SELECT id, value FROM memory WHERE typeof(value) = 'blob' ORDER BY id")
        while some := rows.fetchmany(FLUSH):
            numbers, values = zip(*some, strict=True)
            self._ends.extend(accumulate(map(len, values), initial=len(self._values)))
            self._ends.pop(-len(some) - 1)  # the one that both blocks have
            self._numbers.extend(numbers)
            self._values += b"".join(values)

    def get(self, number: int) -> bytes | None:
        """The record with this number."""
        if number in self._added:
            return self._added[number]
        place = bisect_left(self._numbers, number)
        if place == len(self._numbers) or self._numbers[place] != number:
            return None
        return bytes(self._values[self._ends[place] : self._ends[place + 1]])

    def add(self, records: dict[int, bytes]) -> None:
        """Adds records, in place of those with their numbers."""
        self._added |= records


def is_at_rest(changed: int, begun: int) -> bool:
    """Whether a file last changed at `changed` was at rest when reading began at `begun` (both in ns)."""
    return begun - changed > REST_NS


def _number(name: bytes) -> int:
    return int(_NUMBER.unpack(_blake2b(name, digest_size=8).digest())[0])


# ---- files -----------------------------------------------------------------------------------------------------------


def _connect(path: Path, mode: str) -> sqlite3.Connection | None:
    """A connection to the file, "ro" or "rwc"; `None` if there is no file to read, or others could have written it.

    Raises `sqlite3.DatabaseError` for a file that is no SQLite database, or not one with a rollback journal.
    """
    try:
        if why_not_private(path.parent) is not None:
            return None
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        with path.open("rb") as file:
            head = file.read(100)
    except FileNotFoundError:
        if mode == "ro":
            return None
        head = b""
    if head and (not head.startswith(_HEAD) or head[_JOURNAL] != b"\1\1"):
        raise _damaged(f"{path} does not start with the header of a memory file")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", timeout=WAIT, uri=True,
                                 check_same_thread=False)
    connection.text_factory = bytes  # a flipped bit can turn a blob into text; the checksum detects it
    return connection


def _open(path: Path) -> sqlite3.Connection | None:
    """A connection for looking up records; `None` if there is no file. A damaged file is removed."""
    connection = None
    with _disposable(path):
        connection = _connect(path, "ro")
        if connection is not None and _check(connection):
            return connection
    if connection is not None:
        connection.close()
    return None


def _check(connection: sqlite3.Connection, *, every_page: bool = False) -> bool:
    """Whether the table exists. Raises `sqlite3.DatabaseError` for any other table and for damaged pages.

    Checking every page takes 50 ms for 300,000 records; without that, SQLite would write into damaged pages.
    """
    schema = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    if schema and schema != _SCHEMA:
        raise _damaged(f"{schema} is not the schema of a memory file")
    if every_page:
        ((fault,),) = connection.execute("PRAGMA quick_check(1)")
        if fault != b"ok":
            raise _damaged(str(fault))
    return bool(schema)


def _prepare(connection: sqlite3.Connection, *, every_page: bool) -> None:
    """Makes the table if it is missing."""
    connection.execute("PRAGMA synchronous = OFF")  # disposable: a power failure may cost the file
    if not _check(connection, every_page=every_page):
        connection.execute(f"PRAGMA page_size = {_PAGE}")
        connection.execute("PRAGMA auto_vacuum = FULL")  # so that the file shrinks when records are removed
        connection.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS"))


def _forget(connection: sqlite3.Connection, today: int) -> None:
    """Removes records that are long unused, once a day, and the oldest records of a file that is too large."""
    if _pragma(connection, "user_version") != today:
        connection.execute("DELETE FROM memory WHERE day NOT BETWEEN ? AND ?", (today - DAYS, today + DAYS))
        connection.execute(f"PRAGMA user_version = {today}")
    pages = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
    size = pages * _pragma(connection, "page_size")
    if size > MOST_BYTES:
        ((count,),) = connection.execute("SELECT count(*) FROM memory")
        surplus = count - count * 3 * MOST_BYTES // (4 * size)
        connection.execute("DELETE FROM memory WHERE id IN (SELECT id FROM memory ORDER BY day LIMIT ?)", (surplus,))


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _damaged(what: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(what)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


@contextmanager
def _disposable(path: Path) -> Iterator[None]:
    """Suppresses all errors of a memory file: nothing is lost, the files are read again next time.

    Removes the memory file if it is damaged, but not if it is locked or unreadable.
    """
    try:
        yield
    except (OSError, sqlite3.Error, MemoryError, UnicodeDecodeError) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_BUSY) & 0xFF
        damaged = code not in _ELSEWHERE or isinstance(error, UnicodeDecodeError)  # from damaged bytes in a message
        if damaged and not _nothing_written:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def memory_files(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """(kind, path, bytes) of each file in the directory of all memories, sorted. Raises `OSError`."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            if match := _FILE.fullmatch(entry.name):
                yield match["kind"], Path(entry.path), entry.stat(follow_symlinks=False).st_size


def _tidy(folder: Path, keep: Path) -> None:
    """Removes files that no run has written for a long time, and the oldest files if the total is too large."""
    files: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        files = [(path.lstat().st_mtime, size, path) for _, path, size in memory_files(folder)]
    total, oldest = sum(size for _, size, _ in files), time.time() - (DAYS + REFRESH) * _DAY
    for written, size, path in sorted(files):
        if (written < oldest or total > MOST_IN_ALL) and path != keep:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
