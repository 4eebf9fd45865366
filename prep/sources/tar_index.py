"""Remembers the grouped members of tars: reading an unchanged tar again needs neither its headers nor torch.

One record per tar in the user's memory (`prep.fs.memo`), under the tar's stamp: compressed JSON. Disposable: a record
that describes an impossible tar counts as missing.
"""

from __future__ import annotations

import json
import re
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from prep.findings import CODES
from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.fs.memo import Memo, is_at_rest, memo_path
from prep.fs.stamps import sized_stamp
from prep.parse import Unparsed

VERSION = 4  # raised when `prep.sources.tars` lists or groups tars differently, or reports other findings
MOST_BYTES = 1 << 28  # of a decompressed record: enough for a tar of two million members
# Not remembered of a whole tar: the disk, or the load, may be at fault.
_PASSING = {"unreadable-file", "corrupt-data", "bad-archive"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TarMember:
    """A member's name, and the place of its bytes in the tar."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A finding on a member or a key, or on the whole tar if `name` is empty."""

    name: str
    code: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TarContents:
    """The samples of a tar in order, each with its members by suffix (the part after the key), and its findings."""

    groups: dict[str, dict[str, TarMember]]
    said: tuple[Said, ...]


class Listings:
    """The remembered contents of tars; `trust=False` lists each tar again and replaces its record."""

    def __init__(self, *, trust: bool = True) -> None:
        # another Python's tarfile may read the headers differently
        self._memo = Memo(memo_path("tars", f"{VERSION} {sys.hexversion}"), trust=trust)

    def of(self, tar: Blob, make: Callable[[], TarContents]) -> TarContents:
        """The contents of a tar: remembered if it is unchanged, else from `make`. Raises what `make` does."""
        begun = time.time_ns()
        known = _stamped(tar)
        if known is None:
            return make()
        stamp, changed, size = known
        contents = _recalled(self._memo.recall(stamp), size)
        if contents is not None:
            return contents
        contents = make()
        if is_at_rest(changed, begun) and _stamped(replace(tar, version="")) == known and not _may_pass(contents):
            self._note(stamp, contents)
        return contents

    def close(self) -> None:
        """Closes the memory."""
        self._memo.close()

    def _note(self, stamp: bytes, contents: TarContents) -> None:
        with suppress(MemoryError):
            text = _spelled(contents)
            if len(text) <= MOST_BYTES:
                self._memo.note(stamp, zlib.compress(text, 1))
                self._memo.save()  # at once: a walk over tars may stop at any of them


def lands_outside(name: str) -> bool:
    """Whether a member called `name` would be unpacked outside its directory, on Linux or on Windows."""
    if ".." not in name and ":" not in name and name[:1] not in "/\\":
        return False  # the common case, without building a path for each of a million names
    slashed = PurePosixPath(name.replace("\\", "/"))
    return slashed.is_absolute() or ".." in slashed.parts or re.match("[A-Za-z]:", name) is not None


def _may_pass(contents: TarContents) -> bool:
    return any(not finding.name and finding.code in _PASSING for finding in contents.said)


def _stamped(tar: Blob) -> tuple[bytes, int, int] | None:
    """(stamp, time of the last change, size) of a tar; `None` if it cannot be read. Raises `StoreError`."""
    try:
        return sized_stamp(tar)
    except OSError:
        return None


# ---- records ---------------------------------------------------------------------------------------------------------


def _recalled(record: bytes | None, size: int) -> TarContents | None:
    """The contents in a record of a tar of `size` bytes; `None` for a missing or invalid record."""
    if record is None:
        return None
    try:
        return _parsed(_unpacked(record), size)
    except (MemoryError, RecursionError, ValueError, TypeError, KeyError, zlib.error):
        return None


def _spelled(contents: TarContents) -> bytes:
    groups = [[key, [[suffix, member.name, member.offset, member.size] for suffix, member in parts.items()]]
              for key, parts in contents.groups.items()]
    said = [[finding.name, finding.code, finding.detail] for finding in contents.said]
    return json.dumps([groups, said], separators=(",", ":")).encode("ascii")


def _unpacked(record: bytes) -> Any:
    """The document of a record. Raises `ValueError` or `zlib.error`."""
    running = zlib.decompressobj()
    text = running.decompress(record, MOST_BYTES)
    if not running.eof:
        raise Unparsed(f"the record has more than {MOST_BYTES} bytes")
    return json.loads(text)


def _parsed(document: Any, size: int) -> TarContents:
    """The contents in a document. Raises `ValueError`, `TypeError` or `KeyError` if no tar of `size` bytes can have
    them."""
    listed, said = document
    groups: dict[str, dict[str, TarMember]] = {}
    for key, members in listed:
        parts = {_text(suffix): _member(_text(name), offset, length, size) for suffix, name, offset, length in members}
        if _text(key) in groups or not parts:
            raise Unparsed("a key of the record is repeated, or has no members")
        groups[key] = parts
    return TarContents(groups=groups, said=tuple(_said(*map(_text, fields)) for fields in said))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Unparsed("a name of the record is not a string")
    printable_name(value)  # raises for unpaired surrogates, which no member's name has
    return value


def _member(name: str, offset: Any, length: Any, size: int) -> TarMember:
    if type(offset) is not int or type(length) is not int or length < 0 or not 0 <= offset <= size - length:
        raise Unparsed("a member of the record lies outside the tar")
    if lands_outside(name):
        raise Unparsed("a member of the record would be unpacked outside its directory")
    return TarMember(name=name, offset=offset, size=length)


def _said(name: str, code: str, detail: str) -> Said:
    if code not in CODES:
        raise Unparsed("a finding of the record has an unknown code")
    return Said(name=name, code=code, detail=detail)
