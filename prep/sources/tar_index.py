"""What tars hold, listed and grouped once: whoever reads an unchanged tar again needs neither its headers nor torch.

A record of the user's memory (`prep.fs.memo`) for each tar, named by the tar's stamp: JSON, compressed. Disposable: one
that says what no tar can hold counts as missing.
"""

from __future__ import annotations

import json
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
from prep.fs.blob import Blob
from prep.fs.memo import Memo, is_at_rest, memo_path
from prep.fs.stamps import blob_stamp
from prep.parse import Unparsed

VERSION = 4  # raised when `prep.sources.tars` would list or group a tar in another way, or say another thing of it
MOST_BYTES = 1 << 28  # of a record unpacked: a tar of two million members has no more
_PASSING = {"unreadable-file", "corrupt-data", "bad-archive"}  # of a whole tar: the disk, or the load, may be at fault


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
    """What is remembered of tars; `trust=False` lists each again and remembers that."""

    def __init__(self, *, trust: bool = True) -> None:
        # this Python's tarfile reads the headers, and may know better than the last one
        self._memo = Memo(memo_path("tars", f"{VERSION} {sys.hexversion}"), trust=trust)

    def of(self, path: Path, make: Callable[[], Contents]) -> Contents:
        """What the tar at `path` holds: from memory where it is unchanged, else what `make` says, whose errors these
        are."""
        begun = time.time_ns()
        known = _stamped(path)
        if known is None:
            return make()
        stamp, changed, size = known
        found = _recalled(self._memo.recall(stamp), size)
        if found is not None:
            return found
        found = make()
        if is_at_rest(changed, begun) and _stamped(path) == known and not _may_pass(found):
            self._note(stamp, found)
        return found

    def close(self) -> None:
        """Closes the memory."""
        self._memo.close()

    def _note(self, stamp: bytes, contents: Contents) -> None:
        with suppress(MemoryError):
            text = _spelled(contents)
            if len(text) <= MOST_BYTES:
                self._memo.note(stamp, zlib.compress(text, 1))
                self._memo.save()  # at once: whoever walks tars may stop at any of them


def lands_outside(name: str) -> bool:
    """Whether a member of this name would land outside its directory when unpacked, also by Windows' reading."""
    if ".." not in name and ":" not in name and name[:1] not in "/\\":
        return False  # without a path for each of a million names
    slashed = PurePosixPath(name.replace("\\", "/"))
    return slashed.is_absolute() or ".." in slashed.parts or re.match("[A-Za-z]:", name) is not None


def _may_pass(contents: Contents) -> bool:
    return any(not one.name and one.code in _PASSING for one in contents.said)


def _stamped(path: Path) -> tuple[bytes, int, int] | None:
    """(its stamp, when it last changed, its size) of the tar at `path`; `None` where there is none."""
    try:
        return *blob_stamp(Blob(file=str(path))), path.stat().st_size
    except OSError:
        return None


# ---- records ---------------------------------------------------------------------------------------------------------


def _recalled(record: bytes | None, size: int) -> Contents | None:
    """The contents in a record, for a tar of `size` bytes; `None` for one that is not there, or not as it was made."""
    if record is None:
        return None
    try:
        return _parsed(_unpacked(record), size)
    except (MemoryError, RecursionError, ValueError, TypeError, KeyError, zlib.error):
        return None


def _spelled(contents: Contents) -> bytes:
    groups = [[key, [[suffix, one.name, one.offset, one.size] for suffix, one in parts.items()]]
              for key, parts in contents.groups.items()]
    said = [[one.name, one.code, one.detail] for one in contents.said]
    return json.dumps([groups, said], separators=(",", ":")).encode("ascii")


def _unpacked(record: bytes) -> Any:
    """The document of a record. Raises `ValueError` or `zlib.error`."""
    running = zlib.decompressobj()
    text = running.decompress(record, MOST_BYTES)
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
