"""Lists the members of a tar from its headers alone. Runs in a worker (`prep.sources.readers`).

Every member is checked against the file's size. A finding names members that would be unpacked outside their directory
or through a link, and they are skipped: nothing here unpacks them, but users who do so elsewhere should know. `tarfile`
was not made for hostile headers: this module bounds how much it reads at once and how many PAX records it keeps, and
treats whatever it raises as a damaged tar.
"""

from __future__ import annotations

import os
import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Protocol

import msgspec

from prep.fs.blob import Blob, open_file
from prep.sources.tar_index import Said, TarMember, lands_outside

MOST_HEADER = 1 << 20  # bytes of a name or of PAX records; most have some hundred, an extended attribute 64 KiB at most
MOST_RECORDS = 1024  # in global PAX headers: `tarfile` copies all of them for each member; git archive writes one
PART = 10_000  # members and findings per part
_PACKED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstandard"}
_META = re.compile(r"(.*/)?(__[^/]*__|\.(?!\.?(/|$))[^/]*)(/.*)?")  # WebDataset's, hidden, and macOS's side files
_KINDS = {tarfile.SYMTYPE: "a link", tarfile.LNKTYPE: "a hard link", tarfile.FIFOTYPE: "a named pipe",
          tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.GNUTYPE_SPARSE: "a sparse file"}


class _Stream(Protocol):
    def seek(self, place: int, /) -> int: ...
    def tell(self) -> int: ...
    def read(self, size: int, /) -> bytes: ...


class BadHeader(tarfile.ReadError):
    """A header that makes `tarfile` fail."""


class TarPart(msgspec.Struct, frozen=True, array_like=True):
    """Some usable members, in order, and findings on others. Names are bytes: tars allow any."""

    members: list[tuple[bytes, int, int]]  # name, offset, size
    said: list[tuple[bytes, str, str]]  # name, or b"" for the whole tar; code; detail


class TarMessage(msgspec.Struct, frozen=True, array_like=True):
    """A tar to list: a path, which may not be valid UTF-8, or the size and headers of a tar in a store."""

    file: bytes
    size: int = 0  # bytes, of one in a store
    headers: list[tuple[int, bytes]] | None = None  # of one in a store: places in it, ascending, and the bytes there


class Headers:
    """A stream with only the headers of a tar, at their places."""

    def __init__(self, size: int, headers: list[tuple[int, bytes]]) -> None:
        self._size, self._headers = size, headers
        self._starts = [start for start, _ in headers]
        self._at = 0

    def seek(self, place: int) -> int:
        """Goes to a place in the tar."""
        self._at = place
        return place

    def tell(self) -> int:
        """The place in the tar."""
        return self._at

    def read(self, size: int) -> bytes:
        """The next bytes. Raises `tarfile.ReadError` if they are no headers. `tarfile` reads the last byte of each
        member to see whether it is there, which the size says."""
        size = max(0, min(size, self._size - self._at))
        number = bisect_right(self._starts, self._at) - 1
        start, data = self._headers[number] if number >= 0 else (0, b"")
        data = data[self._at - start : self._at - start + size]
        if len(data) < size and size > 1:
            raise tarfile.ReadError(f"what follows is not at byte {self._at}, where the headers before it put it")
        self._at += size
        return data or bytes(size)


def read_parts(message: TarMessage) -> Iterator[TarPart]:
    """The usable members of a tar and its findings, in parts."""
    part = TarPart([], [])
    entries = (list_tar(Blob(file=os.fsdecode(message.file))) if message.headers is None else
               _list(Headers(message.size, message.headers), message.size))
    for entry in entries:
        name = entry.name.encode("utf-8", "surrogateescape")
        if isinstance(entry, TarMember):
            part.members.append((name, entry.offset, entry.size))
        else:
            part.said.append((name, entry.code, entry.detail.encode("utf-8", "backslashreplace").decode()))
        if len(part.members) + len(part.said) >= PART:
            yield part
            part = TarPart([], [])
    yield part


@dataclass(kw_only=True, slots=True)
class _Walk:
    """The state of listing a tar."""

    size: int  # bytes
    links: set[str] = field(default_factory=set)
    seen: int = 0  # members
    said: int = 0  # findings
    cut: bool = False  # whether one of them already says that the tar ends too early


def list_tar(tar: Blob) -> Iterator[TarMember | Said]:
    """The usable members of a tar of this computer, in order, and findings on the others."""
    try:
        with open_file(tar.path) as stream:
            yield from _list(stream, os.fstat(stream.fileno()).st_size)
    except OSError as error:
        yield Said(name="", code="unreadable-file", detail=f"cannot be read: {error.strerror or error}")


def _list(stream: _Stream, size: int) -> Iterator[TarMember | Said]:
    start = stream.read(2)
    stream.seek(0)
    if size == 0:
        yield Said(name="", code="empty-file", detail="the tar has 0 bytes")
    elif start in _PACKED:
        yield Said(name="", code="packed-archive", detail=f"is compressed with {_PACKED[start]}; its members "
                   "cannot be read in place, so unpack it to a plain .tar")
    else:
        yield from _list_members(stream, _Walk(size=size))


def _list_members(stream: _Stream, walk: _Walk) -> Iterator[TarMember | Said]:
    try:
        for info in _headers(stream, walk):
            entry = _use(info, walk)
            if isinstance(entry, Said):
                walk.said += 1
                walk.cut |= entry.code == "truncated"
            if entry is not None:
                yield entry
    except tarfile.TarError as error:
        code = "truncated" if walk.seen and "unexpected end" in str(error) else \
            "corrupt-data" if walk.seen or isinstance(error, BadHeader) else "not-an-archive"
        if not walk.cut:
            yield Said(name="", code=code, detail=f"the tar cannot be read beyond member {walk.seen}: {error}")
        return
    if (said := _at_end(stream, walk)) is not None:
        yield said


def _headers(stream: _Stream, walk: _Walk) -> Iterator[tarfile.TarInfo]:
    """The headers of a tar; leaves the stream after the last. Raises `tarfile.TarError`, `OSError`."""
    # "r:" rules compression out. UTF-8 with surrogates: any bytes are a valid name.
    with _only_tar_errors():
        tar = tarfile.open(fileobj=_Bounded(stream), mode="r:", encoding="utf-8",  # type: ignore[call-overload]  # noqa: SIM115
                           errors="surrogateescape")
    while True:
        with _only_tar_errors():
            info: tarfile.TarInfo | None = tar.next()
        if info is None:
            break
        tar.members = []  # or `tarfile` keeps all headers in memory
        if info.size < 0 or tar.offset <= info.offset:  # the next header would be this one again, forever
            raise tarfile.ReadError(f"its header says {info.size} bytes")
        if len(tar.pax_headers) > MOST_RECORDS:
            raise BadHeader(f"it has {len(tar.pax_headers)} global PAX records, expected at most {MOST_RECORDS}")
        walk.seen += 1
        yield info
    stream.seek(tar.offset)


@contextmanager
def _only_tar_errors() -> Iterator[None]:
    """Turns any exception of `tarfile` into a `TarError`: numbers in hostile headers can make it raise anything."""
    try:
        yield
    except (tarfile.TarError, OSError, MemoryError):
        raise
    except Exception as error:
        raise BadHeader(type(error).__name__) from None


class _Bounded:
    """A stream of bounded reads: `tarfile` reads as many bytes at once as a hostile header says, or the whole file."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        """The next bytes. Raises `tarfile.ReadError` for more than `MOST_HEADER`."""
        if not 0 <= size <= MOST_HEADER:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return self._stream.read(size)


def _at_end(stream: _Stream, walk: _Walk) -> Said | None:
    """The finding on the end of the tar, if any. `tarfile` also stops at an invalid header; only a block of zeros is
    the end, otherwise members are lost."""
    block = stream.read(tarfile.BLOCKSIZE)
    if any(block):
        return Said(name="", code="corrupt-data",
                    detail=f"member {walk.seen} is followed by an invalid header: members after it are lost")
    if len(block) < tarfile.BLOCKSIZE and not walk.said:
        return Said(name="", code="archive-unended",
                    detail=f"the tar ends after member {walk.seen} without an end marker")
    if not walk.seen:
        return Said(name="", code="empty-archive", detail="the tar has no members")
    return None


def _use(info: tarfile.TarInfo, walk: _Walk) -> TarMember | Said | None:
    """A usable member, a finding on it, or `None` if it is ignored."""
    name = info.name
    if info.isdir() or _META.fullmatch(name):
        return None
    path = PurePosixPath(name)
    if info.issym():
        walk.links.add(str(path))  # ./NAME is NAME
    if lands_outside(name):
        return _left_out(name, "path-traversal", "would be unpacked outside its directory; skipped")
    if any(str(above) in walk.links for above in path.parents):
        return _left_out(name, "path-traversal", "would be unpacked through a link; skipped")
    if not info.isreg() or info.sparse is not None:
        return _left_out(name, "special-file", f"is {_KINDS.get(info.type, 'no file')}; skipped")
    if info.offset_data + info.size > walk.size:
        return _left_out(name, "truncated",
                         f"the tar ends after {max(0, walk.size - info.offset_data)} of its {info.size} bytes")
    if "." not in path.name or "\n" in name:  # webdataset finds no key in such a name
        return _left_out(name, "unsupported-format", "")  # remembered without the formats: later versions may read more
    return TarMember(name=name, offset=info.offset_data, size=info.size)


def _left_out(name: str, code: str, detail: str) -> Said:
    return Said(name=name, code=code, detail=detail)
