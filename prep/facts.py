"""What is known of files already read: digests and headers by inode, size, mtime and ctime. Disposable.

A stamp is trusted only when the file was at rest for two seconds as it was read: a file system's clock is that coarse
at worst, and a file written twice within one tick would look unchanged. Where ctime is a creation time (Windows) a
replaced file can keep all its stamps, so nothing is remembered there.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from prep.records import Blob
from prep.sources.blob import read_blob

VERSION = 1  # of the table and of what its values mean; any other is thrown away
REST_NS = 2_000_000_000
WAIT = 1.0  # seconds for another process that has the table locked
# Device and inode as text: both may pass SQLite's 63 bits.
_TABLE = """CREATE TABLE IF NOT EXISTS facts (kind TEXT, dev TEXT, ino TEXT, size INTEGER, mtime INTEGER, ctime INTEGER,
            value TEXT, PRIMARY KEY (kind, dev, ino, size, mtime, ctime)) WITHOUT ROWID"""

Stamp = tuple[str, str, int, int, int]


class Facts:
    """Remembered facts; thread-safe. `save` writes the new ones; an unreadable or unwritable file is no fault."""

    def __init__(self, path: Path | None, *, trust: bool = True) -> None:
        self._path = path
        self._trust = trust and ctime_is_change()
        self._known: dict[tuple[str, Stamp], str] = _load(path) if path is not None and self._trust else {}
        self._new: dict[tuple[str, Stamp], str] = {}
        self._lock = threading.Lock()
        self.read = 0  # files that had to be read

    def of(self, path: Path, kind: str, make: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
        """What `make` says of the file's bytes, from memory where the file is unchanged. Raises `OSError`."""
        return self.by_stamp(path, kind, lambda: make(read_blob(Blob(path=path))))

    def by_stamp(self, path: Path, kind: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` says of the file at `path`, from memory where the file is unchanged. Raises `OSError`."""
        before = _stamp(path)
        known = self._known.get((kind, before))
        if known is not None:
            return dict(json.loads(known))
        value = make()
        with self._lock:
            self.read += 1
            if _stamp(path) == before and time.time_ns() - max(before[3], before[4]) > REST_NS:
                self._new[(kind, before)] = json.dumps(value)
        return value

    def save(self) -> None:
        """Writes what is new, so that the next run need not read those files."""
        if self._path is None or not self._new or not self._trust:
            return
        rows = [(kind, *stamp, value) for (kind, stamp), value in self._new.items()]
        try:
            with closing(sqlite3.connect(self._path, timeout=WAIT)) as connection, connection:
                _prepare(connection)
                connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            _remove_damaged(self._path, error)  # nothing is lost: the files are read again next time


def ctime_is_change() -> bool:
    """Whether ctime is the time of the last change here, and not that of creation."""
    return os.name != "nt"


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return str(stat.st_dev), str(stat.st_ino), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _load(path: Path) -> dict[tuple[str, Stamp], str]:
    if not path.is_file():
        return {}
    try:
        with closing(sqlite3.connect(path, timeout=WAIT)) as connection:
            if _version(connection) != VERSION:
                return {}
            rows = connection.execute("SELECT * FROM facts").fetchall()
        return {(row[0], tuple(row[1:6])): row[6] for row in rows if isinstance(row[6], str)}
    except sqlite3.Error as error:
        _remove_damaged(path, error)
        return {}


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _prepare(connection: sqlite3.Connection) -> None:
    """An empty table, where there is none or one of another version."""
    if _version(connection) != VERSION:
        connection.execute("DROP TABLE IF EXISTS facts")
        connection.execute(_TABLE)
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _remove_damaged(path: Path, error: sqlite3.Error) -> None:
    """Removes a file that is no database (any more), and nothing else: one that is locked is another run's."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        with suppress(OSError):
            path.unlink(missing_ok=True)
