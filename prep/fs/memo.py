"""What is known of files already read, and of shards: facts by inode, size, mtime and ctime, or by digest. Disposable.

A stamp is trusted only when the file was at rest for two seconds before it was read: a file system's clock is that
coarse at worst, and a file written twice within one tick would look unchanged. Where ctime is a creation time (Windows)
a replaced file can keep all its stamps, so nothing is remembered there.

Every record has a CRC-32 of its name and its value, which finds any one flipped bit: such a record is as good as none.
A table that SQLite cannot read, or that is not as it was made, goes and is made again.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from prep.fs.blob import Blob, read_blob
from prep.fs.stamps import SETTLE_NS, blob_stamp, ctime_is_reliable

VERSION = 3  # of the table and of what its values mean; any other is thrown away
WAIT = 1.0  # seconds for another process that has the table locked
CRC = struct.Struct("<I")
_TABLE = "CREATE TABLE facts (name BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID"
_SCHEMA = [(b"table", b"facts", _TABLE.encode())]
_HEAD = b"SQLite format 3\0"
_JOURNAL = slice(18, 20)  # of the head: 1, 1 is a rollback journal, the only kind that is ever asked for here
# What says nothing of the table itself: it is locked, or its disk or directory is at fault.
_ELSEWHERE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
              sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM}

_PARSE = json.JSONDecoder().raw_decode  # what `json.loads` does at last, in a third of its time

Fact = dict[str, Any]


class Memo:
    """Remembered facts; thread-safe. `save` writes the new ones; an unreadable or unwritable file is no fault."""

    def __init__(self, path: Path | None, *, trust: bool = True) -> None:
        self._path = path
        self.trust = trust and ctime_is_reliable()  # whether anything is taken from memory
        self._known: dict[bytes, bytes] = _load(path) if path is not None and self.trust else {}
        self._new: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self.read = 0  # files that had to be read

    def get_or_read(self, blob: Blob, kind: str, make: Callable[[bytes], Fact]) -> Fact:
        """What `make` says of the blob's bytes, from memory where its file is unchanged. Raises `OSError`."""
        return self._ask(blob, kind, lambda: make(read_blob(blob)))

    def get_or_compute(self, path: Path, kind: str, make: Callable[[], Fact]) -> Fact:
        """What `make` says of the file at `path`, from memory where it is unchanged. Raises `OSError`."""
        return self._ask(Blob(file=str(path)), kind, make)

    def get(self, blob: Blob, kind: str) -> Fact | None:
        """What is remembered of `blob`, which is not read; `None`: nothing that can be trusted. Raises `OSError`."""
        return self._recall(kind, blob_stamp(blob)[0])

    def get_digest(self, kind: str, digest: str) -> bytes | None:
        """What was noted of the thing that has this digest."""
        return self._sound(kind.encode() + b":" + bytes.fromhex(digest))

    def put_digest(self, kind: str, digest: str, value: bytes) -> None:
        """Remembers `value`, which must depend on nothing but the thing that has this digest."""
        self._note(kind, bytes.fromhex(digest), value)

    def save(self) -> None:
        """Writes what is new, so that the next run need not read those files."""
        if self._path is None or not self._new or not self.trust:
            return
        for _ in range(2):  # again where the table was damaged and is gone now
            with disposable(self._path):
                with closing(connect(self._path)) as connection, connection:
                    _prepare(connection)
                    connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", self._new.items())
                self._known |= self._new
                self._new = {}
            if not self._new or self._path.exists():
                return

    def _ask(self, blob: Blob, kind: str, make: Callable[[], Fact]) -> Fact:
        begun = time.time_ns()
        before, changed = blob_stamp(blob)
        known = self._recall(kind, before)
        if known is not None:
            return known
        value = make()
        with self._lock:
            self.read += 1
        if blob_stamp(blob)[0] == before and begun - changed > SETTLE_NS:
            self._note(kind, before, json.dumps(value).encode())
        return value

    def _recall(self, kind: str, stamp: bytes) -> Fact | None:
        value = self._sound(kind.encode() + b":" + stamp)
        return None if value is None else _PARSE(value.decode())[0]

    def _sound(self, name: bytes) -> bytes | None:
        value = self._known.get(name)
        if value is None or value[:4] != CRC.pack(crc32(value[4:], crc32(name))):
            return None
        return value[4:]

    def _note(self, kind: str, what: bytes, value: bytes) -> None:
        name = kind.encode() + b":" + what
        with self._lock:
            self._new[name] = CRC.pack(crc32(value, crc32(name))) + value


def _load(path: Path) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    with disposable(path):
        if not path.is_file():
            return {}
        _check_head(path)
        with closing(connect(path)) as connection:
            if _version(connection) == VERSION:
                _check_table(connection)
                rows = connection.execute("SELECT name, value FROM facts WHERE typeof(value) = 'blob'")
                found = dict(rows.fetchall())
    return found


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=WAIT)
    connection.text_factory = bytes  # a flipped bit makes text of bytes; their checksum says what they are worth
    return connection


def _check_head(path: Path) -> None:
    """Raises `sqlite3.DatabaseError` for a file that SQLite would not write, or would keep a second file beside."""
    with path.open("rb") as file:
        head = file.read(100)
    if head and (not head.startswith(_HEAD) or head[_JOURNAL] != b"\1\1"):
        raise _damaged(f"{path} does not begin as a table of facts does")


def _check_table(connection: sqlite3.Connection) -> None:
    """Raises `sqlite3.DatabaseError` unless there is the one table, as it was made, with sound pages.

    50 ms for 300,000 records: SQLite writes into pages that are not sound without a word.
    """
    there = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    if there != _SCHEMA:
        raise _damaged(f"{there} is not the schema of facts")
    ((found,),) = connection.execute("PRAGMA quick_check(1)")
    if found != b"ok":
        raise _damaged(str(found))


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _prepare(connection: sqlite3.Connection) -> None:
    """An empty table, where there is none or one of another version."""
    if _version(connection) != VERSION:
        connection.execute("DROP TABLE IF EXISTS facts")
        connection.execute(_TABLE)
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _damaged(what: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(what)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


@contextmanager
def disposable(path: Path) -> Iterator[None]:
    """Nothing that is wrong with the table is an error: nothing is lost, the files are read again next time.

    A table that is damaged is removed; one that is locked, or that lies where nothing can be read, is not.
    """
    try:
        yield
    except (OSError, sqlite3.Error, MemoryError, UnicodeDecodeError) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_BUSY) & 0xFF
        if code not in _ELSEWHERE or isinstance(error, UnicodeDecodeError):  # that of a message on a spoiled name
            with suppress(OSError):
                path.unlink(missing_ok=True)
