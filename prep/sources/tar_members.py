"""The members of a tar, from its headers alone. Runs in a worker (`prep.sources.readers`).

Every member is bounded by the file's size. Members that would land outside when unpacked, or through a link, are left
out with a finding: nothing here writes, yet who unpacks that tar elsewhere should know. `tarfile` was not made for
hostile headers: how much it reads at once and how many PAX records it carries along are bounded here, and whatever it
raises is a damaged tar.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from prep.fs.blob import open_file
from prep.sources.tar_index import Member, Said, lands_outside

MOST_HEADER = 1 << 20  # bytes of a name or of PAX records; those in use have some hundred, an attribute 64 KiB at most
MOST_RECORDS = 1024  # of global PAX headers: `tarfile` copies all of them for each member; git archive writes one
PART = 10_000  # members, and findings, of a part
_PACKED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstandard"}
_META = re.compile(r"(.*/)?(__[^/]*__|\.(?!\.?(/|$))[^/]*)(/.*)?")  # WebDataset's own, hidden, and macOS's side files
_KINDS = {tarfile.SYMTYPE: "a link", tarfile.LNKTYPE: "a hard link", tarfile.FIFOTYPE: "a named pipe",
          tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.GNUTYPE_SPARSE: "a sparse file"}


class BadHeader(tarfile.ReadError):
    """A header that `tarfile` fails on."""


class TarPart(msgspec.Struct, frozen=True, array_like=True):
    """Some members that can be used, in order, and what is to be said of others. Names are bytes: any are allowed."""

    members: list[tuple[bytes, int, int]]  # name, offset, size
    said: list[tuple[bytes, str, str]]  # name, or nothing for the whole tar; code; detail


def read_parts(path: Path) -> Iterator[TarPart]:
    """The members of the tar at `path`, and what is to be said of it."""
    part = TarPart([], [])
    for one in list_tar(path):
        name = one.name.encode("utf-8", "surrogateescape")
        if isinstance(one, Member):
            part.members.append((name, one.offset, one.size))
        else:
            part.said.append((name, one.code, one.detail.encode("utf-8", "backslashreplace").decode()))
        if len(part.members) + len(part.said) >= PART:
            yield part
            part = TarPart([], [])
    yield part


@dataclass(kw_only=True, slots=True)
class _Walk:
    """What is known of a tar on the way through it."""

    size: int  # bytes
    links: set[str] = field(default_factory=set)
    seen: int = 0  # members
    said: int = 0  # findings
    cut: bool = False  # whether one of them says that the tar ends too early


def list_tar(path: Path) -> Iterator[Member | Said]:
    """The members of the tar at `path` that can be used, in order, and what is to be said of the others."""
    try:
        with open_file(path) as stream:
            yield from _list(stream, os.fstat(stream.fileno()).st_size)
    except OSError as error:
        yield Said(name="", code="unreadable-file", detail=f"cannot be read: {error.strerror or error}")


def _list(stream: BinaryIO, size: int) -> Iterator[Member | Said]:
    start = stream.read(2)
    stream.seek(0)
    if size == 0:
        yield Said(name="", code="empty-file", detail="the tar has 0 bytes")
    elif start in _PACKED:
        yield Said(name="", code="packed-archive", detail=f"is compressed with {_PACKED[start]}; members of such a tar "
                   "cannot be read where they lie, so unpack it to a plain .tar")
    else:
        yield from _list_members(stream, _Walk(size=size))


def _list_members(stream: BinaryIO, walk: _Walk) -> Iterator[Member | Said]:
    try:
        for info in _headers(stream, walk):
            one = _use(info, walk)
            if isinstance(one, Said):
                walk.said += 1
                walk.cut |= one.code == "truncated"
            if one is not None:
                yield one
    except tarfile.TarError as error:
        code = "truncated" if walk.seen and "unexpected end" in str(error) else \
            "corrupt-data" if walk.seen or isinstance(error, BadHeader) else "not-an-archive"
        if not walk.cut:
            yield Said(name="", code=code, detail=f"the tar cannot be read beyond member {walk.seen}: {error}")
        return
    if (said := _at_end(stream, walk)) is not None:
        yield said


def _headers(stream: BinaryIO, walk: _Walk) -> Iterator[tarfile.TarInfo]:
    """The headers of a tar; the stream is left behind the last. Raises `tarfile.TarError`, `OSError`."""
    # "r:": no compression is looked for. UTF-8 with surrogates: any bytes are a name.
    with _only_tar_errors():
        tar = tarfile.open(fileobj=_Bounded(stream), mode="r:", encoding="utf-8",  # type: ignore[call-overload]  # noqa: SIM115
                           errors="surrogateescape")
    while True:
        with _only_tar_errors():
            info: tarfile.TarInfo | None = tar.next()
        if info is None:
            break
        tar.members = []  # or the list of all headers stays in memory
        if info.size < 0 or tar.offset <= info.offset:  # the next would be this one again, for ever
            raise tarfile.ReadError(f"its header says {info.size} bytes")
        if len(tar.pax_headers) > MOST_RECORDS:
            raise BadHeader(f"it has {len(tar.pax_headers)} global PAX records, expected at most {MOST_RECORDS}")
        walk.seen += 1
        yield info
    stream.seek(tar.offset)


@contextmanager
def _only_tar_errors() -> Iterator[None]:
    """Makes an error of `tarfile` of whatever it raises: numbers in hostile headers lead it anywhere."""
    try:
        yield
    except (tarfile.TarError, OSError, MemoryError):
        raise
    except Exception as error:
        raise BadHeader(type(error).__name__) from None


class _Bounded:
    """A stream of headers: `tarfile` asks for as many bytes at once as a hostile one says, or for all there are."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        """The next bytes. Raises `tarfile.ReadError` for more than any header has."""
        if not 0 <= size <= MOST_HEADER:
            raise tarfile.ReadError(f"a header says that it has {size} bytes")
        return self._stream.read(size)


def _at_end(stream: BinaryIO, walk: _Walk) -> Said | None:
    """What is to be said of the end. `tarfile` takes a header that is none for it; ours is a block of zeros, or else
    something is lost."""
    block = stream.read(tarfile.BLOCKSIZE)
    if any(block):
        return Said(name="", code="corrupt-data",
                    detail=f"what follows member {walk.seen} is no header: members after it are lost")
    if len(block) < tarfile.BLOCKSIZE and not walk.said:
        return Said(name="", code="archive-unended",
                    detail=f"the tar ends after member {walk.seen} without an end mark, expected one")
    if not walk.seen:
        return Said(name="", code="empty-archive", detail="the tar has no members")
    return None


def _use(info: tarfile.TarInfo, walk: _Walk) -> Member | Said | None:
    """A member that can be used, what is to be said of it, or nothing."""
    name = info.name
    if info.isdir() or _META.fullmatch(name):
        return None
    path = PurePosixPath(name)
    if info.issym():
        walk.links.add(str(path))  # ./NAME is NAME
    if lands_outside(name):
        return _left_out(name, "path-traversal", "would land outside its directory when unpacked; left out")
    if any(str(above) in walk.links for above in path.parents):
        return _left_out(name, "path-traversal", "would be written through a link when unpacked; left out")
    if not info.isreg() or info.sparse is not None:
        return _left_out(name, "special-file", f"is {_KINDS.get(info.type, 'no file')}; left out")
    if info.offset_data + info.size > walk.size:
        return _left_out(name, "truncated",
                         f"the tar ends after {max(0, walk.size - info.offset_data)} of its {info.size} bytes")
    if "." not in path.name or "\n" in name:  # of which webdataset makes no key
        return _left_out(name, "unsupported-format", "")  # what is read may be more by the time this is remembered
    return Member(name=name, offset=info.offset_data, size=info.size)


def _left_out(name: str, code: str, detail: str) -> Said:
    return Said(name=name, code=code, detail=detail)
