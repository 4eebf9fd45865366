"""WebDataset tars → items: members that share a key are one sample, read where they lie in the tar, never unpacked.

A key is a member's path up to the first dot of its name; the rest says what it is: a picture's extension, `txt`,
`caption` or `json`, `mask.png` or (key`-masklabel`) `png`. We open the tar, list its members and bound every one by the
file's size; `webdataset` is given that list to group, and never a name to open. Members that would land outside when
unpacked, or through a link, are left out with a finding: nothing here writes, yet who unpacks that tar elsewhere
should know.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from prep.errors import PathError
from prep.findings import Finding, Severity
from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.runtime import defer_interrupts
from prep.sources.item import Item
from prep.sources.tar_index import Contents, Listings, Member, Said, lands_outside
from prep.sources.tree import MASK, PICTURES

CAPTIONS = ("txt", "caption", "json")  # the first found counts
MASKS = ("mask.png", "masklabel.png")
MOST_HEADER = 1 << 24  # bytes of a name or of PAX records; those in use have some hundred
_PICTURES = tuple(extension[1:] for extension in PICTURES)
_PACKED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstandard"}
_META = re.compile(r"(.*/)?(__[^/]*__|\.(?!\.?(/|$))[^/]*)(/.*)?")  # WebDataset's own, hidden, and macOS's side files
_KINDS = {tarfile.SYMTYPE: "a link", tarfile.LNKTYPE: "a hard link", tarfile.FIFOTYPE: "a named pipe",
          tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.GNUTYPE_SPARSE: "a sparse file"}
_NOT_READ = f"no picture: after the first dot of its name, expected one of {' '.join(_PICTURES)}"
_SAID = {"duplicate-key": "warning", "special-file": "warning", "unsupported-format": "info",
         "empty-archive": "warning", "archive-unended": "warning"}


@dataclass(kw_only=True, slots=True)
class Listing:
    """The members of one tar that can be used, in order, and what is to be said of the others."""

    members: list[Member] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    def say(self, name: str, code: str, detail: str) -> None:
        """Adds what is to be said of a member, or of the whole tar where `name` is empty."""
        self.said.append(Said(name=name, code=code, detail=detail))


def walk_tar(path: Path, *, label: str, source: int, sidecar: bool,
             listings: Listings | None = None) -> Iterator[Item | Finding]:
    """The items of a tar, named `label`/member, and what is to be said; `sidecar`: masks beside pictures are used.

    A tar that `listings` knows is not opened. Raises `PathError` when `path` is no file that can be opened.
    """
    contents = contents_of(path) if listings is None else listings.of(path, lambda: contents_of(path))
    for one in contents.said:
        severity: Severity = _SAID.get(one.code, "error")  # type: ignore[assignment]
        where = f"{label}/{printable_name(one.name)}" if one.name else label
        yield Finding(path=where, code=one.code, severity=severity, detail=one.detail or _NOT_READ)
    groups = contents.groups
    for key, parts in groups.items():
        masks = groups.get(f"{key}{MASK}", {})
        yield from _sample(path, label, source, key, parts, masks if sidecar else {}, groups)


def contents_of(path: Path) -> Contents:
    """What the tar at `path` holds; headers are read, and no contents. Raises `PathError`."""
    listing = list_tar(path)
    groups: dict[str, dict[str, Member]] = {}
    for key, parts in _groups(listing.members):
        if key in groups:
            names = ", ".join(printable_name(member.name) for member in parts.values())
            listing.say(key, "duplicate-key", f"this key comes again later in the tar, with {names}; the first is used")
        else:
            groups[key] = parts
    return Contents(groups=groups, said=tuple(listing.said))


def list_tar(path: Path) -> Listing:
    """The members of the tar at `path`. Raises `PathError`."""
    listing = Listing()
    if not path.is_file():
        raise PathError(f"source {path} is not a file" if path.exists() else f"source {path} does not exist")
    try:
        with path.open("rb") as stream:
            _list(stream, path.stat().st_size, listing)
    except OSError as error:
        listing.say("", "unreadable-file", f"cannot be read: {error.strerror or error}")
    return listing


def _list(stream: BinaryIO, size: int, listing: Listing) -> None:
    start = stream.read(2)
    stream.seek(0)
    if size == 0:
        listing.say("", "empty-file", "the tar has 0 bytes")
    elif start in _PACKED:
        listing.say("", "packed-archive", f"is compressed with {_PACKED[start]}; members of such a tar cannot be read "
                    "where they lie, so unpack it to a plain .tar")
    else:
        _list_members(stream, size, listing)


def _list_members(stream: BinaryIO, size: int, listing: Listing) -> None:
    links: set[str] = set()
    seen = 0
    try:
        # "r:": no compression is looked for. UTF-8 with surrogates: any bytes are a name.
        with tarfile.open(fileobj=_Bounded(stream), mode="r:", encoding="utf-8",  # type: ignore[call-overload]
                          errors="surrogateescape") as tar:
            for info in tar:
                tar.members = []  # or the list of all headers stays in memory
                if info.size < 0 or tar.offset <= info.offset:  # the next would be this one again, for ever
                    raise tarfile.ReadError(f"its header says {info.size} bytes")
                seen += 1
                _add(info, size, links, listing)
            _check_end(stream, tar.offset, seen, listing)
    except tarfile.TarError as error:
        code = "truncated" if seen and "unexpected end" in str(error) else "corrupt-data" if seen else "not-an-archive"
        if not any(one.code == "truncated" for one in listing.said):
            listing.say("", code, f"the tar cannot be read beyond member {seen}: {error}")
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:  # numbers in hostile headers
        listing.say("", "corrupt-data", f"the tar cannot be read beyond member {seen}: {type(error).__name__}")
    if not seen and not listing.said:
        listing.say("", "empty-archive", "the tar has no members")


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


def _check_end(stream: BinaryIO, offset: int, seen: int, listing: Listing) -> None:
    """`tarfile` takes a header that is none for the end; ours is a block of zeros, or else something is lost."""
    stream.seek(offset)
    block = stream.read(tarfile.BLOCKSIZE)
    if any(block):
        listing.say("", "corrupt-data", f"what follows member {seen} is no header: members after it are lost")
    elif len(block) < tarfile.BLOCKSIZE and not listing.said:
        listing.say("", "archive-unended", f"the tar ends after member {seen} without an end mark, expected one")


def _add(info: tarfile.TarInfo, size: int, links: set[str], listing: Listing) -> None:
    name = info.name
    if info.isdir() or _META.fullmatch(name):
        return
    path = PurePosixPath(name)
    if info.issym():
        links.add(str(path))  # ./NAME is NAME
    if lands_outside(name):
        listing.say(name, "path-traversal", "would land outside its directory when unpacked; left out")
    elif any(str(above) in links for above in path.parents):
        listing.say(name, "path-traversal", "would be written through a link when unpacked; left out")
    elif not info.isreg() or info.sparse is not None:
        listing.say(name, "special-file", f"is {_KINDS.get(info.type, 'no file')}; left out")
    elif info.offset_data + info.size > size:
        listing.say(name, "truncated", f"the tar ends after {max(0, size - info.offset_data)} of its {info.size} bytes")
    elif "." not in path.name or "\n" in name:  # of which webdataset makes no key
        listing.say(name, "unsupported-format", "")  # what is read may be more by the time this is remembered
    else:
        listing.members.append(Member(name=name, offset=info.offset_data, size=info.size))


def _groups(members: list[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
    """Consecutive members of one key, by what follows the key in lower case; a repeated name begins another group."""
    if not members:
        return
    with defer_interrupts():
        from webdataset.tariterators import base_plus_ext, group_by_keys  # here: it loads torch

    def spaced() -> Iterator[dict[str, Any]]:
        current, taken = None, set[str]()
        for member in members:
            key, suffix = base_plus_ext(member.name)
            if key != current:
                current, taken = key, set()
            elif suffix.lower() in taken:
                taken = set()
                yield {}  # ends the group
            taken.add((suffix or "").lower())
            yield {"fname": member.name, "data": member, "__url__": ""}

    for sample in group_by_keys(spaced()):
        parts = {suffix: value for suffix, value in sample.items() if isinstance(value, Member)}
        yield str(sample["__key__"]), parts


def _sample(path: Path, label: str, source: int, key: str, parts: Mapping[str, Member], masks: Mapping[str, Member],
            groups: Mapping[str, Mapping[str, Member]]) -> Iterator[Item | Finding]:
    """The item of one key: one for each picture in it, and findings on what is left over."""
    pictures = [suffix for suffix in parts if suffix in _PICTURES]
    if key.endswith(MASK) and key.removesuffix(MASK) in groups:
        return
    caption = next((suffix for suffix in CAPTIONS if suffix in parts), None)
    mask = next((parts[suffix] for suffix in MASKS if suffix in parts), None) or masks.get("png")
    metadata = parts["json"] if caption != "json" and "json" in parts else None
    for suffix in pictures:
        yield Item(name=f"{label}/{printable_name(parts[suffix].name)}", source=source,
                   picture=_blob(path, parts[suffix]),
                   caption=None if caption is None else _blob(path, parts[caption]),
                   caption_format="json" if caption == "json" else "text",
                   mask=None if mask is None else _blob(path, mask),
                   metadata=None if metadata is None or suffix != pictures[0] else _blob(path, metadata))
    if pictures and "txt" in parts and "caption" in parts:
        yield Finding(path=f"{label}/{printable_name(parts['caption'].name)}", code="second-caption", severity="info",
                      detail=f"{printable_name(parts['txt'].name)} is used instead")
    first = f"{label}/{printable_name(next(iter(parts.values())).name)}"
    if len(pictures) > 1:
        yield Finding(path=first, code="stem-collision", severity="warning",
                      detail=f"{len(pictures)} pictures of this key share its caption and mask")
    elif not pictures and caption is not None:
        yield Finding(path=first, code="orphan-caption", severity="warning", detail="caption without a picture")
    elif not pictures:
        yield Finding(path=first, code="unsupported-format", severity="info", detail=_NOT_READ)


def _blob(path: Path, member: Member) -> Blob:
    return Blob(file=str(path), offset=member.offset, length=member.size, member=printable_name(member.name))
