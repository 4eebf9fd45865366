"""What earlier runs read of files, so that the next run need not open them. Disposable.

Records lie in SQLite files in a private directory of the user (`prep.fs.user_cache`) and nowhere else: whoever can
write a record decides what a file is believed to hold, and a journal beside a database can name files that SQLite
deletes. So a directory that others can write to is never used.

Each kind of memory has a version, which is part of its file's name: a program of another version, or with another
version of a decoder, starts with an empty memory and leaves the other one alone. Every record has a CRC-32 of its name
and value, which finds any one flipped bit; a damaged record counts as missing, and a damaged file is removed and made
again. Records that no run used for 90 days go, and the oldest go first where a file, or all files, get too large.

A file's stamp (device, inode, size, mtime, ctime) is trusted only when the file did not change for a minute before it
was read. File systems have clocks as coarse as two seconds; and on Linux a file that is written through a memory
mapping changes its times only once until its pages are written back, which takes up to 35 seconds
(vm.dirty_expire_centisecs and vm.dirty_writeback_centisecs). Where ctime is a creation time (Windows) a replaced file
can keep all of its stamp, so nothing is remembered there.
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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from prep.fs.blob import Blob, read_blob
from prep.fs.stamps import blob_stamp, ctime_is_reliable
from prep.fs.user_cache import make_private, user_cache, why_not_private

FORMAT = 1  # of the files; raised when their layout changes
FOLDER = "memory"  # in the user's cache directory
REST_NS = 60_000_000_000  # how long a file must not have changed before it is read, for its stamp to be trusted
DAYS = 90  # after which a record that no run used goes
REFRESH = 7  # days after which a record that is used is marked as used
MOST_BYTES = 1 << 30  # of one file
MOST_IN_ALL = 1 << 31  # bytes of all files
FLUSH = 2000  # new records that are worth writing in the middle of a run
WAIT = 1.0  # seconds for another process that has the file locked
_DAY = 86400
_CRC = struct.Struct("<I")
_NUMBER = struct.Struct("<q")
_blake2b = hashlib.blake2b
_TABLE = "CREATE TABLE memory (id INTEGER PRIMARY KEY, day INTEGER NOT NULL, value BLOB NOT NULL)"
_SCHEMA = [(b"table", b"memory", _TABLE.encode())]
_HEAD = b"SQLite format 3\0"
_JOURNAL = slice(18, 20)  # of the head: 1, 1 is a rollback journal, the only kind that is used here
_PAGE = 16384  # bytes: thumbnails of 4 kB leave little room at the end of a page
_FILE = re.compile(r"(?P<kind>[a-z]+)-[0-9a-f]{16}\.sqlite(-journal|-wal|-shm)?")
# Errors that say nothing about the file itself: it is locked, or its disk or directory is at fault.
_ELSEWHERE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
              sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM}

_PARSE = json.JSONDecoder().raw_decode  # what `json.loads` ends up calling, in a third of the time

Fact = dict[str, Any]
_nothing_written = False


@contextmanager
def dry_run() -> Iterator[None]:
    """Inside, no memory writes anything: no record, no directory, and nothing damaged is removed."""
    global _nothing_written
    before, _nothing_written = _nothing_written, True
    try:
        yield
    finally:
        _nothing_written = before


def memory_folder() -> Path | None:
    """The directory of all memories, whether it exists or not; `None` for a user without a home."""
    root = user_cache()
    return None if root is None else root / FOLDER


def memo_path(kind: str, version: str, *, scope: str = "") -> Path | None:
    """The file of a kind of memory, of this version and for this scope (of a cache, its path; "": for all)."""
    folder = memory_folder()
    if folder is None:
        return None
    name = json.dumps([FORMAT, kind, version, scope]).encode("ascii")
    return folder / f"{kind}-{hashlib.blake2b(name, digest_size=8).hexdigest()}.sqlite"


class Memo:
    """Remembered records by name; thread-safe. `save` writes the new ones. No fault of the file is an error.

    `trust=False` believes nothing that is remembered, and remembers what is read now. `preload` reads all records at
    once (0.25 s for 300,000), for whoever will ask for most of them; else each is looked up when asked for (6 µs).
    """

    def __init__(self, path: Path | None, *, trust: bool = True, preload: bool = False) -> None:
        reliable = ctime_is_reliable()
        self._path = path if reliable else None
        self.trust = trust and reliable  # whether anything is taken from memory
        self.read = 0  # files that had to be read
        self._new: dict[int, bytes] = {}
        self._used: list[int] = []  # records that were used, and not marked as used lately
        self._stale: set[int] = set()  # of the preloaded: not marked as used lately
        self._flush = FLUSH
        self._today = int(time.time()) // _DAY
        self._lock = threading.RLock()
        self._checked = False  # whether every page of the file was looked at
        self._connection: sqlite3.Connection | None = None
        self._loaded: dict[int, bytes] | None = None
        if self._path is not None and self.trust:
            if preload:
                self._preload(self._path)
            else:
                self._connection = _open(self._path)

    def recall(self, name: bytes) -> bytes | None:
        """The record of this name; `None` where there is none, or none that is intact."""
        if not self.trust:
            return None
        number = _number(name)
        value = self._loaded.get(number) if self._loaded else None
        if value is None:
            value = self._new.get(number) or self._find(number)
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
            if self._loaded is not None:
                self._loaded[number] = self._new[number]

    def flush(self) -> None:
        """Writes what is new once that is much."""
        if len(self._new) >= self._flush:
            self.save()

    def get_or_read(self, blob: Blob, kind: str, make: Callable[[bytes], Fact]) -> Fact:
        """What `make` says of the blob's bytes, from memory where its file is unchanged. Raises `OSError`."""
        return self._ask(blob, kind, lambda: make(read_blob(blob)))

    def get_or_compute(self, path: Path, kind: str, make: Callable[[], Fact]) -> Fact:
        """What `make` says of the file at `path`, from memory where it is unchanged. Raises `OSError`."""
        return self._ask(Blob(file=str(path)), kind, make)

    def get(self, blob: Blob, kind: str) -> Fact | None:
        """What is remembered of `blob`, which is not read; `None`: nothing that can be trusted. Raises `OSError`."""
        return self._recall_fact(kind, blob_stamp(blob)[0])

    def get_digest(self, kind: str, digest: str) -> bytes | None:
        """What was noted of the thing that has this digest."""
        return self.recall(kind.encode() + b":" + bytes.fromhex(digest))

    def put_digest(self, kind: str, digest: str, value: bytes) -> None:
        """Remembers `value`, which must depend on nothing but the thing that has this digest."""
        self.note(kind.encode() + b":" + bytes.fromhex(digest), value)

    def save(self) -> None:
        """Writes what is new, so that the next run need not read those files."""
        if self._path is None or _nothing_written or not (self._new or self._used):
            return
        with self._lock:
            self._flush *= 2  # where it is locked, or the disk full, that is not tried for every record
            for _ in range(2):  # once more where the file was damaged and is removed now
                with _disposable(self._path):
                    make_private(self._path.parent)
                    self._write(self._path)
                if not (self._new or self._used) or os.path.lexists(self._path):
                    break
                self._disconnect()

    def close(self) -> None:
        """Writes what is new, and closes the file."""
        self.save()
        with self._lock:
            self._disconnect()

    def _ask(self, blob: Blob, kind: str, make: Callable[[], Fact]) -> Fact:
        begun = time.time_ns()
        before, changed = blob_stamp(blob)
        known = self._recall_fact(kind, before)
        if known is not None:
            return known
        value = make()
        with self._lock:
            self.read += 1
        if blob_stamp(blob)[0] == before and is_at_rest(changed, begun):
            self.note(kind.encode() + b":" + before, json.dumps(value).encode())
        return value

    def _recall_fact(self, kind: str, stamp: bytes) -> Fact | None:
        value = self.recall(kind.encode() + b":" + stamp)
        return None if value is None else _PARSE(value.decode())[0]

    def _preload(self, path: Path) -> None:
        self._loaded = {}
        with _disposable(path):
            if (connection := _connect(path, "ro")) is None:
                return
            with closing(connection):
                if _check(connection, every_page=True):
                    rows = connection.execute("SELECT id, value FROM memory WHERE typeof(value) = 'blob'")
                    self._loaded = dict(rows.fetchall())
                    rows = connection.execute("SELECT id FROM memory WHERE day < ?", (self._today - REFRESH,))
                    self._stale = {number for number, in rows}
                    self._checked = True

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
        self._new, self._used, self._flush = {}, [], FLUSH
        _tidy(path.parent, keep=path)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def is_at_rest(changed: int, begun: int) -> bool:
    """Whether a file that last changed at `changed` was at rest when reading it was begun (both in ns)."""
    return begun - changed > REST_NS


def _number(name: bytes) -> int:
    return int(_NUMBER.unpack(_blake2b(name, digest_size=8).digest())[0])


# ---- files -----------------------------------------------------------------------------------------------------------


def _connect(path: Path, mode: str) -> sqlite3.Connection | None:
    """A connection to the file, "ro" or "rwc"; `None` where there is none to read, or others could have written it.

    Raises `sqlite3.DatabaseError` for a file that SQLite would not write, or would keep a second file beside.
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
        raise _damaged(f"{path} does not begin as a memory does")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", timeout=WAIT, uri=True,
                                 check_same_thread=False)
    connection.text_factory = bytes  # a flipped bit makes text of bytes; their checksum says what they are worth
    return connection


def _open(path: Path) -> sqlite3.Connection | None:
    """A connection to look records up; `None` where there is no such file. A damaged one is removed."""
    connection = None
    with _disposable(path):
        connection = _connect(path, "ro")
        if connection is not None and _check(connection):
            return connection
    if connection is not None:
        connection.close()
    return None


def _check(connection: sqlite3.Connection, *, every_page: bool = False) -> bool:
    """Whether there are records. Raises `sqlite3.DatabaseError` for other tables, and for pages that are damaged.

    Checking every page takes 50 ms for 300,000 records; without it, SQLite would write into damaged ones.
    """
    there = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    if there and there != _SCHEMA:
        raise _damaged(f"{there} is not the schema of a memory")
    if every_page:
        ((found,),) = connection.execute("PRAGMA quick_check(1)")
        if found != b"ok":
            raise _damaged(str(found))
    return bool(there)


def _prepare(connection: sqlite3.Connection, *, every_page: bool) -> None:
    """Makes the table where there is none."""
    connection.execute("PRAGMA synchronous = OFF")  # disposable: a power cut may cost the file
    if not _check(connection, every_page=every_page):
        connection.execute(f"PRAGMA page_size = {_PAGE}")
        connection.execute("PRAGMA auto_vacuum = FULL")  # so that a file shrinks when records go
        connection.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS"))


def _forget(connection: sqlite3.Connection, today: int) -> None:
    """Removes records that were not used for long, once a day, and the oldest ones of a file that is too large."""
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
    """Suppresses whatever is wrong with a memory: nothing is lost, the files are read again next time.

    A damaged one is removed; one that is locked, or lies where nothing can be read, is not.
    """
    try:
        yield
    except (OSError, sqlite3.Error, MemoryError, UnicodeDecodeError) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_BUSY) & 0xFF
        damaged = code not in _ELSEWHERE or isinstance(error, UnicodeDecodeError)  # in a message with a damaged name
        if damaged and not _nothing_written:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def memory_files(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """(kind, path, bytes) of each file in the directory of all memories, sorted. Raises `OSError`."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            if found := _FILE.fullmatch(entry.name):
                yield found["kind"], Path(entry.path), entry.stat(follow_symlinks=False).st_size


def _tidy(folder: Path, keep: Path) -> None:
    """Removes files that no run wrote to for long, and the oldest where all together are too large."""
    files: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        files = [(path.lstat().st_mtime, size, path) for _, path, size in memory_files(folder)]
    total, oldest = sum(size for _, size, _ in files), time.time() - (DAYS + REFRESH) * _DAY
    for written, size, path in sorted(files):
        if (written < oldest or total > MOST_IN_ALL) and path != keep:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
