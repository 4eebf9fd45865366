"""The tar that `prep pack` writes: plain members in one order, so that a reader knows what comes next.

    MANIFEST.json                  the manifest, as it is
    CACHE/latentry.json            the cache's marker
    CACHE/tables/ab/ab12….arrow    the tables that the manifest names
    CACHE/shards/ab/ab12…/…        the files of each shard, in the order of the table of shards, by name

Names are relative to the nearest directory that holds manifest and cache, so `tar xf` makes a working dataset, too. All
members are regular files, dated 1970, owned by nobody: the same dataset makes the same bytes. Only `prep unpack` checks
the digests.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from prep.cache.remote.shards import RemoteShard
from prep.errors import CacheError, PathError
from prep.formatting import printable
from prep.parse import brief

BLOCK = tarfile.BLOCKSIZE
PIECE = 1 << 20  # bytes read at a time
END = bytes(2 * BLOCK)
AGAIN = "copy the tar again, or make it again: prep pack MANIFEST -o FILE.tar"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackMember:
    """A member's name and size."""

    name: str
    size: int

    @property
    def room(self) -> int:
        """Bytes in a tar, with the header, and padded to whole blocks."""
        return BLOCK + -(-self.size // BLOCK) * BLOCK


def header_of(member: PackMember) -> bytes:
    """The member's header. Raises `PathError` if the name is too long for one."""
    info = tarfile.TarInfo(member.name)
    info.size = member.size
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError as error:
        raise PathError(f"'{printable(member.name)}' cannot be a name in a tar: {error}",
                        hint="move manifest and cache nearer to each other") from None


def read_header(source: BinaryIO, where: Path) -> PackMember:
    """The next member's name and size. Raises `CacheError` at the end, and for anything but a regular file."""
    block = source.read(BLOCK)
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise CacheError(f"{where} ends early, or is not a tar that prep pack wrote: {error}", hint=AGAIN) from None
    if info.type != tarfile.REGTYPE or info.size < 0:
        raise CacheError(f"{where} has a member {brief(info.name)} that is not a file", hint=AGAIN)
    return PackMember(name=info.name, size=info.size)


def expect_member(source: BinaryIO, where: Path, expected: PackMember) -> None:
    """Reads the header of the next member. Raises `CacheError` unless it is `expected`."""
    member = read_header(source, where)
    if member != expected:
        raise CacheError(f"{where} has {brief(member.name)} of {member.size} bytes, where "
                         f"'{printable(expected.name)}' of {expected.size} bytes was expected", hint=AGAIN)


def read_small(source: BinaryIO, where: Path, member: PackMember, most: int) -> bytes:
    """The bytes of a member whose header was read, at most `most`. Raises `CacheError`."""
    data = b"".join(member_parts(source, where, member, most))
    skip(source, -member.size % BLOCK)
    if len(data) < member.size:
        raise CacheError(f"{where} ends within '{printable(member.name)}'", hint=AGAIN)
    return data


def member_parts(source: BinaryIO, where: Path, member: PackMember, most: int) -> Iterator[bytes]:
    """The bytes that `read_small` returns, in pieces, which may end early; the last block's padding is not read. Raises
    `CacheError` at once."""
    if member.size > most:
        raise CacheError(f"{where} has '{printable(member.name)}' of {member.size} bytes, expected at most {most}",
                         hint=AGAIN)
    return parts_of(source, member.size)


def parts_of(source: BinaryIO, size: int) -> Iterator[bytes]:
    """The next `size` bytes, in pieces; fewer if the tar ends."""
    while size and (part := source.read(min(PIECE, size))):
        size -= len(part)
        yield part


def skip(source: BinaryIO, size: int) -> None:
    """Passes over `size` bytes."""
    source.seek(size, 1)


def shard_members(cache: str, shard: RemoteShard) -> Iterator[PackMember]:
    """The members of a shard, of a cache whose name in the tar is `cache`."""
    for name, size in sorted(shard.files.items()):
        yield PackMember(name=f"{cache}/shards/{shard.digest[:2]}/{shard.digest}/{name}", size=size)


def table_name(cache: str, digest: str) -> str:
    """The name of a table."""
    return f"{cache}/tables/{digest[:2]}/{digest}.arrow"


def tables_of(document: Mapping[str, Any]) -> list[str]:
    """The digests of a manifest's tables, in the order of the tar."""
    return sorted(set(document["tables"].values()))
