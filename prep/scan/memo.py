"""What a scan found in files that did not change since, so that the next one opens none of them. Disposable.

One SQLite table for all sources of a user, in the user's cache directory and never beside pictures:
`$XDG_CACHE_HOME/latentry/scan.sqlite`, `~/Library/Caches` on macOS, `%LOCALAPPDATA%` on Windows. A record is named by
the versions of the checks and of the decoders, the item's name and the stamps of its files, which are trusted as
`prep.fs.memo` trusts them, and has a CRC-32. Records are looked up one by one (6 µs), never all loaded; one that no
scan asked for in 90 days goes. A table that is damaged, or of another version, goes as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from zlib import crc32

from prep.fs.atomic import make_dirs
from prep.fs.blob import Blob
from prep.fs.memo import CRC, WAIT, connect, disposable
from prep.fs.paths import user_cache
from prep.fs.stamps import SETTLE_NS, blob_stamp, ctime_is_reliable
from prep.images.plugins import decoders
from prep.parse import Unparsed
from prep.scan.duplicates.correlation import LIMIT, Near, Thumb
from prep.scan.duplicates.identity import Identity
from prep.scan.examine import Examined
from prep.scan.protocol import pack, pack_examined, pack_thumb, unpack, unpack_examined, unpack_thumb
from prep.sources.item import Item

VERSION = 5  # of the checks and of this table: raised when a check of `prep.scan.examine` or a decoder's answer changes
DAYS = 90
_DAY = 86400
_TABLE = "CREATE TABLE IF NOT EXISTS found (name BLOB PRIMARY KEY, day INTEGER, value BLOB) WITHOUT ROWID"


def usual_path() -> Path | None:
    """Where the table is; `None` for a user without a home."""
    root = user_cache()
    return None if root is None else root / "scan.sqlite"


Stamp = tuple[bytes, int]  # a record's name, and when one of its files last changed (ns)


class ScanMemo:
    """What is remembered; for one thread. `save` writes what is new. No fault of the file is an error."""

    def __init__(self, path: Path | None, *, trust: bool = True) -> None:
        self._path = path if ctime_is_reliable() else None
        self._table = None if self._path is None or not trust else _open(self._path)
        self._new: dict[bytes, bytes] = {}
        self._thumbs = 0  # noted
        self._old: list[bytes] = []  # whose day is not today's
        self._today = int(time.time()) // _DAY
        self._decoders = decoders().encode()

    def get(self, item: Item) -> tuple[Stamp | None, Examined | None]:
        """(stamp to note what will be found under, what was found). The first is `None` where files are gone or not at
        rest, the second where nothing is known."""
        now, stamp = time.time_ns(), _stamp(item, self._decoders)
        if stamp is None or self._path is None:
            return None, None
        value, rested = self._value(stamp[0]), now - stamp[1] > SETTLE_NS
        try:
            return stamp if rested else None, None if value is None else unpack_examined(unpack(value)[0], None)
        except Unparsed:
            return stamp if rested else None, None

    def note(self, stamp: Stamp | None, item: Item, examined: Examined) -> None:
        """Remembers what was found, if the item's files are as they were at `stamp`."""
        if stamp is None or _stamp(item, self._decoders) != stamp:
            return
        if any(one.code == "unsupported-format" for one in examined.findings):  # until its extra is installed
            return
        self._new[stamp[0]] = pack(pack_examined(examined))
        if examined.thumb is not None and examined.identity is not None and self._thumbs < LIMIT:
            self._thumbs += 1  # 10 kB each; among more pictures, few are ever asked for
            self._new[_thumb_name(examined.identity)] = pack_thumb(examined.thumb)
        if len(self._new) > 2000:
            self.save()

    def thumb(self, identity: Identity) -> Thumb | None:
        """The thumbnail of a picture whose other facts were recalled."""
        value = self._new.get(name := _thumb_name(identity)) or self._value(name)
        with suppress(Unparsed):
            return unpack_thumb(value or b"")
        return None

    def pixels(self, identity: Identity) -> str:
        """The digest of every pixel of a picture, "" where it is not known."""
        return (self._value(self._pixels_name(identity)) or b"").decode("ascii", "replace")

    def note_pixels(self, identity: Identity, digest: str) -> None:
        """Remembers such a digest, where there is one."""
        if digest:
            self._new[self._pixels_name(identity)] = digest.encode("ascii", "replace")

    def nears(self, names: Iterable[bytes]) -> tuple[bytes, tuple[Near, ...] | None]:
        """(name for `note_nears`, the near-duplicates found) among pictures that these bytes name, in this order."""
        running = hashlib.blake2b(b"near %d " % VERSION, digest_size=16)
        for one in names:
            running.update(one)
        value = self._value(running.digest())
        try:
            found = None if value is None else tuple(
                Near(first=int(first), second=int(second), score=float(score), mirrored=bool(mirrored))
                for first, second, score, mirrored in json.loads(value))
        except (ValueError, TypeError):
            found = None
        return running.digest(), found

    def note_nears(self, name: bytes, nears: Sequence[Near]) -> None:
        """Remembers near-duplicates."""
        self._new[name] = json.dumps([[one.first, one.second, one.score, one.mirrored] for one in nears]).encode()

    def save(self) -> None:
        """Writes what is new, and removes what nobody asked for in a long time."""
        if self._path is None or not (self._new or self._old):
            return
        with disposable(self._path), suppress(OSError):
            make_dirs(self._path.parent)
            with closing(connect(self._path)) as table, table:
                _prepare(table)
                table.executemany("INSERT OR REPLACE INTO found VALUES (?, ?, ?)",
                                  ((name, self._today, CRC.pack(crc32(value, crc32(name))) + value)
                                   for name, value in self._new.items()))
                table.executemany("UPDATE found SET day = ? WHERE name = ?", ((self._today, one) for one in self._old))
                table.execute("DELETE FROM found WHERE day < ?", (self._today - DAYS,))
        self._new, self._old = {}, []

    def close(self) -> None:
        """Writes what is new, and closes the table."""
        self.save()
        if self._table is not None:
            self._table.close()
            self._table = None

    def _pixels_name(self, identity: Identity) -> bytes:
        return b"pixels" + bytes.fromhex(identity.file) + self._decoders

    def _value(self, name: bytes) -> bytes | None:
        if self._table is None:
            return None
        try:
            row = self._table.execute("SELECT day, value FROM found WHERE name = ?", (name,)).fetchone()
        except (sqlite3.Error, MemoryError, UnicodeDecodeError):
            self._table.close()
            self._table = None
            return None
        if row is None or type(row[1]) is not bytes or row[1][:4] != CRC.pack(crc32(row[1][4:], crc32(name))):
            return None
        if row[0] != self._today:
            self._old.append(name)
        return row[1][4:]


def _open(path: Path) -> sqlite3.Connection | None:
    """The table, to be read; `None` where there is none. One that is damaged or of another version is removed."""
    table = None
    with disposable(path):
        if not path.is_file():
            return None
        table = connect(path)
        table.execute("PRAGMA query_only = 1")
        if table.execute("PRAGMA user_version").fetchone()[0] == VERSION:
            table.execute("SELECT name, day, value FROM found LIMIT 1")
            return table
    if table is not None:
        table.close()
    return None


def _prepare(table: sqlite3.Connection) -> None:
    table.execute(f"PRAGMA busy_timeout = {int(1000 * WAIT)}")
    if table.execute("PRAGMA user_version").fetchone()[0] != VERSION:
        table.execute("DROP TABLE IF EXISTS found")
        table.execute(f"PRAGMA user_version = {VERSION}")
    table.execute(_TABLE)


def _stamp(item: Item, decoders: bytes) -> Stamp | None:
    """What changes with an item, its files, the checks or the decoders; `None` where a file is gone."""
    running = hashlib.blake2b(b"%d %s" % (VERSION, decoders), digest_size=16)
    running.update(repr((item.name, item.source, item.caption_format, item.captions)).encode(errors="surrogatepass"))
    changed = 0
    for blob in (item.picture, item.caption, item.mask, item.metadata):
        if blob is None:
            running.update(b"none")
            continue
        try:
            stamp, when = blob_stamp(blob)
        except OSError:
            return None
        running.update(stamp)
        running.update(_place(blob))
        changed = max(changed, when)
    return running.digest(), changed


def _place(blob: Blob) -> bytes:
    """A mask's place is part of what is said of it."""
    return os.fsencode(blob.file) + blob.member.encode(errors="surrogatepass")


def _thumb_name(identity: Identity) -> bytes:
    return b"thumb" + bytes.fromhex(identity.file)
