"""Implements `prep unpack`: makes manifest and cache of a tar that `prep pack` wrote, and checks every digest.

The tar is untrusted: each member must be the one that the manifest asks for next, so no name of the tar's decides where
anything is written. Shards that are there are passed over, so the same command continues an interrupted one. The
manifest comes last.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from prep.cache.publish import publish_dir, publish_parts
from prep.cache.remote.documents import MOST_TABLE
from prep.cache.store import MARKER_BYTES, Cache, open_cache
from prep.errors import CacheError, PathError
from prep.export.packed.tar_format import (
    AGAIN,
    BLOCK,
    expect_member,
    member_parts,
    parts_of,
    read_header,
    read_small,
    shard_members,
    skip,
    table_name,
    tables_of,
)
from prep.export.sample import safe_path
from prep.formatting import printable, shards_moved
from prep.fs import atomic
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.paths import MARKER, check_replaceable
from prep.fs.place import require_local
from prep.fs.tree import listing_digest
from prep.fs.untrusted import open_regular, stream_of
from prep.manifest.consistency import read_shards
from prep.manifest.document import LIMIT, Manifest, looks_like_manifest, read_manifest
from prep.manifest.shards import ShardFacts
from prep.progress import Progress, Tick, silent


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpackReport:
    """The result of `prep unpack`."""

    manifest: Path
    shards: int
    unpacked: int
    bytes: int  # of shards unpacked

    def as_json(self) -> dict[str, Any]:
        """The document of `prep unpack --json`."""
        return {"format": "latentry/unpack", "version": 1, "manifest": str(self.manifest), "shards": self.shards,
                "unpacked": self.unpacked, "bytes": self.bytes}

    def as_text(self) -> str:
        """The output of `prep unpack`."""
        return f"{self.manifest}: {shards_moved(self.shards, self.unpacked, self.bytes, 'unpacked', 'here')}"


def unpack(file: Path, folder: Path, *, progress: Progress = silent) -> UnpackReport:
    """Unpacks a tar into `folder`, which may not exist yet.

    Raises `PathError`, `ManifestError`, `CacheError` for a tar that is damaged or not of `prep pack`, `OSError`.
    """
    require_local(file, "tar")
    require_local(folder, "DIR")
    with stream_of(open_regular(file)) as source:
        first = read_header(source, file)
        if safe_path(first.name) != first.name or not first.name.endswith(".json"):
            raise CacheError(f"{file} is not a tar that prep pack wrote: it begins with '{printable(first.name)}', "
                             "expected a manifest", hint=AGAIN)
        data = read_small(source, file, first, LIMIT)
        target = folder.absolute() / first.name
        atomic.make_dirs(target.parent)
        check_replaceable(target, "manifest", looks_like_manifest)
        with atomic.staged(target) as staged:
            atomic.write_synced(staged, data)
            manifest = read_manifest(staged, fetch=False)
            shards, unpacked = _fill(source, file, manifest, folder.absolute(), progress)
            atomic.publish(staged, target)
    return UnpackReport(manifest=folder / first.name, shards=len(shards), unpacked=len(unpacked),
                        bytes=sum(shard.bytes for shard in unpacked))


def _fill(source: BinaryIO, file: Path, manifest: Manifest, folder: Path, progress: Progress
          ) -> tuple[tuple[ShardFacts, ...], list[ShardFacts]]:
    """Unpacks all but the manifest; returns all shards, and those that were missing."""
    name = _cache_name(manifest, folder)
    cache = open_cache(folder / name, create=True)
    marker = read_header(source, file)
    if marker.name != f"{name}/{MARKER}" or (
            read_small(source, file, marker, MARKER_BYTES) != cache.read(cache.root / MARKER, MARKER_BYTES)):
        raise CacheError(f"{file} is not a tar that prep pack wrote: it has no marker of a cache of this version",
                         hint=AGAIN)
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        for digest in tables_of(manifest.document):
            member = read_header(source, file)
            parts = member_parts(source, file, member, MOST_TABLE)
            after = source.tell() + member.room - BLOCK
            if member.name != table_name(name, digest) or not publish_parts(cache, digest, parts):
                raise CacheError(f"{file} is damaged: table {digest} is not what comes next", hint=AGAIN)
            source.seek(after)
        shards = read_shards(cache, manifest)
        with progress("unpacking", sum(shard.bytes for shard in shards), "bytes") as tick:
            return shards, [shard for shard in shards if _unpacked(source, file, name, cache, shard, tick)]


def _cache_name(manifest: Manifest, folder: Path) -> str:
    """The cache's path below `folder`. Raises `PathError` if the manifest names a place outside."""
    named = manifest.document["cache"]
    place = Path(os.path.normpath(require_local(manifest.cache, "cache", AGAIN).absolute()))
    if not place.is_relative_to(folder) or place == folder:
        raise PathError(f"the manifest names the cache {printable(named)}, which would lie outside {folder}",
                        hint=AGAIN)
    return place.relative_to(folder).as_posix()


def _unpacked(source: BinaryIO, file: Path, name: str, cache: Cache, shard: ShardFacts, tick: Tick) -> bool:
    """Unpacks a shard unless it exists; returns whether it did. Raises `CacheError` for bytes of another shard."""
    members = list(shard_members(name, shard.remote))
    if cache.shard(shard.digest).is_dir() and not cache.damaged(shard.digest).exists():
        skip(source, sum(member.room for member in members))
        tick(shard.bytes)
        return False
    listing = []
    with cache.staged() as staged:
        for member in members:
            expect_member(source, file, member)
            inner = member.name.partition(f"/{shard.digest}/")[2]
            listing.append({"path": inner, "size": member.size,
                            "sha256": _copied(source, staged / inner, member.size, tick)})
        if listing_digest(listing) != shard.digest:
            raise CacheError(f"{file} is damaged: the bytes of shard {shard.digest} do not match its digest",
                             hint=AGAIN)
        for made in {(staged / name).parent for name in shard.remote.files} | {staged}:
            atomic.sync_dir(made)
        publish_dir(cache, staged, shard.digest)
    return True


def _copied(source: BinaryIO, path: Path, size: int, tick: Tick) -> str:
    """Writes and syncs a member's bytes; returns their SHA-256. A tar that ends early makes another digest."""
    atomic.make_dirs(path.parent)
    running = hashlib.sha256()
    with atomic.create(path) as handle:
        for part in parts_of(source, size):
            atomic.write(handle, part)
            running.update(part)
            tick(len(part))
        atomic.sync(handle)
    skip(source, -size % BLOCK)
    return running.hexdigest()
