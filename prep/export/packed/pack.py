"""Implements `prep pack`: a manifest and what it needs of its cache, as one tar (`prep.export.packed.tar_format`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from prep.cache.store import MARKER_BYTES, Cache, cache_at
from prep.errors import CacheError, PathError
from prep.export.packed.tar_format import (
    BLOCK,
    END,
    PackMember,
    header_of,
    parts_of,
    shard_members,
    table_name,
    tables_of,
)
from prep.formatting import counted, format_bytes
from prep.fs import atomic
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.paths import MARKER
from prep.fs.place import Place, require_local
from prep.fs.tree import listing_digest
from prep.fs.untrusted import open_regular, read_regular, size_regular, stream_of
from prep.manifest.commands import repair_command
from prep.manifest.consistency import read_shards
from prep.manifest.document import LIMIT, Manifest, read_manifest
from prep.manifest.shards import ShardFacts
from prep.progress import Progress, Tick, silent


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReport:
    """The result of `prep pack`."""

    file: Path
    shards: int
    bytes: int  # of the tar

    def as_json(self) -> dict[str, Any]:
        """The document of `prep pack --json`."""
        return {"format": "latentry/pack", "version": 1, "file": str(self.file), "shards": self.shards,
                "bytes": self.bytes}

    def as_text(self) -> str:
        """The output of `prep pack`."""
        return f"{self.file}: {counted(self.shards, 'shard')}, {format_bytes(self.bytes)}"


def pack(path: Place, output: Path, *, progress: Progress = silent) -> PackReport:
    """Writes the manifest at `path` and what it needs to the tar `output`, a new file; checks every digest on the way.

    Nothing is left if that fails. Raises `PathError`, `ManifestError`, `CacheError`, `OSError`.
    """
    here = require_local(path, "manifest")
    require_local(output, "tar")
    if output.exists():
        raise PathError(f"{output} is there already", hint="remove it, or name another file with -o")
    manifest = read_manifest(path, fetch=False)
    name, root = _names(here, manifest)
    cache = cache_at(manifest.cache)
    shards = read_shards(cache, manifest)
    with (atomic.new_file(output) as handle, lock_directory(cache.root, exclusive=False, patience=PATIENCE),
          progress("packing", sum(shard.bytes for shard in shards), "bytes") as tick):
        _add(handle, name, read_regular(here, LIMIT))
        _add(handle, f"{root}/{MARKER}", read_regular(cache.root / MARKER, MARKER_BYTES))
        for table in tables_of(manifest.document):
            _add_table(handle, table_name(root, table), cache, table, manifest)
        for shard in shards:
            _add_shard(handle, root, cache, shard, manifest, tick)
        atomic.write(handle, END)
        size = handle.tell()
    return PackReport(file=output, shards=len(shards), bytes=size)


def _names(path: Path, manifest: Manifest) -> tuple[str, str]:
    """Names of manifest and cache relative to the nearest directory that holds both. Raises `PathError`."""
    home, cache = path.absolute(), Path(os.path.normpath(require_local(manifest.cache, "cache").absolute()))
    common = Path(os.path.commonpath([home.parent, cache]))
    if cache == common:
        common = common.parent  # the manifest lies in its cache
    return home.relative_to(common).as_posix(), cache.relative_to(common).as_posix()


def _add_table(handle: BinaryIO, name: str, cache: Cache, digest: str, manifest: Manifest) -> None:
    """Adds a table. Raises `CacheError` if its bytes are not the ones whose digest is its name."""
    otherwise = CacheError(f"table {digest} is damaged: its bytes do not match its name",
                           hint=repair_command(manifest))
    member = PackMember(name=name, size=size_regular(cache.table(digest)))
    if _add_file(handle, member, _parts(cache.table(digest), member.size, otherwise)) != digest:
        raise otherwise


def _add(handle: BinaryIO, name: str, data: bytes) -> None:
    """Adds a small file."""
    _add_file(handle, PackMember(name=name, size=len(data)), [data])


def _add_file(handle: BinaryIO, member: PackMember, parts: Iterable[bytes], tick: Tick = lambda _: None) -> str:
    """Adds a file that comes in parts, and returns the SHA-256 of its bytes."""
    atomic.write(handle, header_of(member))
    running = hashlib.sha256()
    for part in parts:
        atomic.write(handle, part)
        running.update(part)
        tick(len(part))
    atomic.write(handle, bytes(-member.size % BLOCK))
    return running.hexdigest()


def _add_shard(handle: BinaryIO, root: str, cache: Cache, shard: ShardFacts, manifest: Manifest, tick: Tick) -> None:
    """Adds the files of a shard. Raises `CacheError` if they are not the ones whose digest is its name."""
    folder, listing = cache.shard(shard.digest), []
    for member in shard_members(root, shard.remote):
        name = member.name.partition(f"/{shard.digest}/")[2]
        digest = _add_file(handle, member, _parts(folder / name, member.size, _spoiled(shard, manifest)), tick)
        listing.append({"path": name, "size": member.size, "sha256": digest})
    if listing_digest(listing) != shard.digest:
        raise _spoiled(shard, manifest)


def _parts(path: Path, size: int, otherwise: CacheError) -> Iterator[bytes]:
    """Yields the bytes of a file of exactly `size` bytes. Raises `otherwise` if it is missing or has another size."""
    try:
        handle = stream_of(open_regular(path))
    except OSError:
        raise otherwise from None
    with handle:
        yield from parts_of(handle, size)
        if handle.tell() != size or handle.read(1):
            raise otherwise


def _spoiled(shard: ShardFacts, manifest: Manifest) -> CacheError:
    return CacheError(f"shard {shard.digest} is damaged: its bytes do not match its digest",
                      hint=repair_command(manifest))
