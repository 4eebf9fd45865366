"""What tars hold, listed and grouped once: whoever reads an unchanged tar again needs neither its headers nor torch.

One file for each tar in the user's cache directory, never beside the tar. Its name says which tar: by the stamp, which
is trusted as `prep.fs.memo` trusts it, and by the version of what lists and groups. It holds a digest and JSON, packed.
Disposable: one that is damaged or strange is as good as none, one that nobody asked for in 90 days goes, and one that
cannot be written is no error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from prep.findings import CODES
from prep.formatting import printable_name
from prep.fs.atomic import create, make_dirs, remove, rename, temporary_name, write
from prep.fs.blob import Blob
from prep.fs.paths import user_cache
from prep.fs.stamps import SETTLE_NS, blob_stamp, ctime_is_reliable
from prep.parse import Unparsed

VERSION = 3  # raised when `prep.sources.tars` would list or group a tar in another way, or say another thing of it
DAYS = 90
MOST_BYTES = 1 << 28  # of a record unpacked: a tar of two million members has no more
_DAY = 86400
_DIGEST = 16
_PASSING = {"unreadable-file", "corrupt-data"}  # said of a whole tar: the disk or the memory may be at fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Where a member's bytes lie in its tar."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What is to be said of a member or a key, or of the whole tar where `name` is empty."""

    name: str
    code: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The samples of a tar in order, each with its members by what follows the key; and what is to be said."""

    groups: dict[str, dict[str, Member]]
    said: tuple[Said, ...]


class Listings:
    """What is remembered of tars; `trust=False` asks for nothing and remembers what it sees."""

    def __init__(self, *, trust: bool = True) -> None:
        root = user_cache() if ctime_is_reliable() else None
        self._folder = None if root is None else root / "tars"
        self._trust = trust
        self._wrote = False

    def of(self, path: Path, make: Callable[[], Contents]) -> Contents:
        """What the tar at `path` holds: from memory where it is unchanged, else what `make` says, whose errors these
        are."""
        begun = time.time_ns()
        known = None if self._folder is None else _named(path, self._folder)
        if known is None:
            return make()
        record, changed, size = known
        found = _recalled(record, size) if self._trust else None
        if found is not None:
            return found
        found = make()
        if begun - changed > SETTLE_NS and _named(path, record.parent) == known and not _may_pass(found):
            self._wrote |= _noted(record, found)
        return found

    def tidy(self) -> None:
        """What nobody asked for in a long time goes, when something new was written."""
        if self._folder is None or not self._wrote:
            return
        oldest = time.time() - DAYS * _DAY
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        remove(Path(entry.path))


def lands_outside(name: str) -> bool:
    """Whether a member of this name would land outside its directory when unpacked, also by Windows' reading."""
    if ".." not in name and ":" not in name and name[:1] not in "/\\":
        return False  # without a path for each of a million names
    slashed = PurePosixPath(name.replace("\\", "/"))
    return slashed.is_absolute() or ".." in slashed.parts or re.match("[A-Za-z]:", name) is not None


def _may_pass(contents: Contents) -> bool:
    return any(not one.name and one.code in _PASSING for one in contents.said)


def _named(path: Path, folder: Path) -> tuple[Path, int, int] | None:
    """(its record, when it last changed, its size) of the tar at `path`; `None` where there is none."""
    try:
        stamp, changed = blob_stamp(Blob(file=str(path)))
        size = path.stat().st_size
    except OSError:
        return None
    # this Python's tarfile reads the headers, and may know better than the last one
    made_by = b"%d %d " % (VERSION, sys.hexversion)
    return folder / hashlib.blake2b(made_by + stamp, digest_size=_DIGEST).hexdigest(), changed, size


# ---- records ---------------------------------------------------------------------------------------------------------


def _recalled(record: Path, size: int) -> Contents | None:
    """The contents in a record, for a tar of `size` bytes; `None` for one that is not there, or not as it was made."""
    try:
        with record.open("rb") as file:
            asked = os.fstat(file.fileno())
            data = file.read() if asked.st_size <= MOST_BYTES else b""
        contents = _parsed(_unpacked(record.name, data), size)
    except (OSError, MemoryError, RecursionError, ValueError, TypeError, KeyError, zlib.error):
        return None
    if time.time() - asked.st_mtime > _DAY:
        with suppress(OSError):
            os.utime(record)
    return contents


def _noted(record: Path, contents: Contents) -> bool:
    """Whether the contents could be written as `record`, whole or not at all."""
    groups = [[key, [[suffix, one.name, one.offset, one.size] for suffix, one in parts.items()]]
              for key, parts in contents.groups.items()]
    said = [[one.name, one.code, one.detail] for one in contents.said]
    with suppress(OSError, MemoryError):
        body = json.dumps([groups, said], separators=(",", ":")).encode("ascii")
        if len(body) > MOST_BYTES:
            return False
        body = zlib.compress(body, 1)
        make_dirs(record.parent)
        staged = temporary_name(record)
        try:
            with create(staged) as file:
                write(file, _digest(record.name, body) + body)
            rename(staged, record)
        finally:
            remove(staged)
        return True
    return False


def _digest(name: str, body: bytes) -> bytes:
    return hashlib.blake2b(name.encode("ascii") + body, digest_size=_DIGEST).digest()


def _unpacked(name: str, data: bytes) -> Any:
    """The document of a record's bytes. Raises `ValueError` or `zlib.error`."""
    body = data[_DIGEST:]
    if data[:_DIGEST] != _digest(name, body):
        raise Unparsed("the record does not match its own digest")
    running = zlib.decompressobj()
    text = running.decompress(body, MOST_BYTES)
    if not running.eof:
        raise Unparsed("the record is longer than any is")
    return json.loads(text)


def _parsed(document: Any, size: int) -> Contents:
    """The contents in a document. Raises `ValueError`, `TypeError` or `KeyError` for one that says what no tar of
    `size` bytes holds."""
    listed, said = document
    groups: dict[str, dict[str, Member]] = {}
    for key, members in listed:
        parts = {_text(suffix): _member(_text(name), offset, length, size) for suffix, name, offset, length in members}
        if _text(key) in groups or not parts:
            raise Unparsed("a key of the record is there twice, or has no members")
        groups[key] = parts
    return Contents(groups=groups, said=tuple(_said(*map(_text, one)) for one in said))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Unparsed("a name of the record is none")
    printable_name(value)  # raises for halves of characters, which no member is called by
    return value


def _member(name: str, offset: Any, length: Any, size: int) -> Member:
    if type(offset) is not int or type(length) is not int or length < 0 or not 0 <= offset <= size - length:
        raise Unparsed("a member of the record lies outside the tar")
    if lands_outside(name):
        raise Unparsed("a member of the record would land outside its directory")
    return Member(name=name, offset=offset, size=length)


def _said(name: str, code: str, detail: str) -> Said:
    if code not in CODES:
        raise Unparsed("what the record says of the tar is no finding")
    return Said(name=name, code=code, detail=detail)
