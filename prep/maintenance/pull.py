"""Implements `prep pull`: downloads a manifest and its cache from an object store to this computer.

Each shard gets a commit here, so `prep encode` can go on, and `prep push` uploads the cache with commits again.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.cache.commits import tasks_by_shard
from prep.cache.publish import publish_parts
from prep.cache.remote.shards import download_shard
from prep.cache.shard_check import verify_shard
from prep.cache.store import Cache, cache_at, open_cache
from prep.digest import canonical
from prep.errors import CacheError, PathError
from prep.formatting import shards_moved
from prep.fs.atomic import make_dirs, write_atomic
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.paths import check_replaceable
from prep.fs.place import Place, require_local, require_stored
from prep.fs.remote.retry import side_by_side
from prep.fs.untrusted import read_parts
from prep.maintenance.repair import write_salvaged
from prep.manifest.consistency import read_shards
from prep.manifest.document import Manifest, looks_like_manifest, read_manifest
from prep.manifest.shards import ShardFacts
from prep.progress import Progress, Tick, silent

ELSEWHERE = "download both with another program, such as rclone, to places that lie so to each other"


@dataclass(frozen=True, kw_only=True, slots=True)
class PullReport:
    """What was downloaded."""

    manifest: Path
    shards: int
    fetched: int
    bytes: int  # fetched

    def as_json(self) -> dict[str, Any]:
        """The document of `prep pull --json`."""
        return {"format": "latentry/pull", "version": 1, "manifest": str(self.manifest), "shards": self.shards,
                "fetched": self.fetched, "bytes": self.bytes}

    def as_text(self) -> str:
        """The output of `prep pull`."""
        return f"{self.manifest}: {shards_moved(self.shards, self.fetched, self.bytes, 'downloaded', 'here')}"


def pull(url: Place, folder: Path, *, recheck: bool = False, jobs: int = 8, progress: Progress = silent) -> PullReport:
    """Downloads the manifest at `url` and what it needs into `folder`, which may not exist yet.

    What is there is not downloaded again; `recheck` reads it all to be sure. The manifest is written last. Raises
    `PathError`, `ManifestError`, `CacheError`, `OSError`.
    """
    url = require_stored(url, "s3://bucket/dataset/manifest.json", "name the manifest that prep push uploaded")
    folder = require_local(folder, "DIR")
    manifest = read_manifest(url)
    remote, place = cache_at(manifest.cache), _place(manifest, folder)
    shards = read_shards(remote, manifest)
    make_dirs(folder.absolute())
    target = folder / url.name
    check_replaceable(target, "manifest", looks_like_manifest)
    cache = open_cache(place, create=True)
    with (lock_directory(cache.root, exclusive=False, patience=PATIENCE),
          progress("downloading", sum(shard.bytes for shard in shards), "bytes") as tick):
        for table in manifest.document["tables"].values():
            _copy_table(remote, cache, table)
        fetched = _download(remote, cache, shards, recheck, jobs, tick)
    write_atomic(target, canonical(manifest.document))
    return PullReport(manifest=target, shards=len(shards), fetched=len(fetched),
                      bytes=sum(shard.bytes for shard in fetched))


def _place(manifest: Manifest, folder: Path) -> Path:
    """Where the cache goes: as it lies to the manifest in the store.

    Raises `PathError` if that is not in `folder`, also where a link in it leads out.
    """
    named = manifest.document["cache"]
    top, place = folder.absolute(), Path(os.path.normpath(folder.absolute() / named))
    # Of names that are too long, or links in a circle, `realpath` resolves what it can; making the cache fails then.
    if not (place.is_relative_to(top) and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(top))):
        raise PathError(f"{manifest.path} names the cache {named[:200]}, which would lie outside {folder}",
                        hint=ELSEWHERE)
    return place


def _copy_table(remote: Cache, cache: Cache, digest: str) -> None:
    """Copies a table from the copy that `read_manifest` made of it. Raises `CacheError`, `OSError`."""
    if not publish_parts(cache, digest, read_parts(remote.table(digest))):
        raise CacheError(f"{remote.table(digest)} changed while it was copied", hint="run the same command again")


def _download(remote: Cache, cache: Cache, shards: tuple[ShardFacts, ...], recheck: bool, jobs: int,
              tick: Tick) -> list[ShardFacts]:
    """Downloads the shards that `cache` lacks, several at a time, and returns them.

    Each has a commit afterwards: so its rows count. Which one it has in the store could only be found by reading all
    that are there; a salvaged one says as much.
    """
    stop, named = threading.Event(), tasks_by_shard(cache)

    def fetch(shard: ShardFacts) -> bool:
        intact = cache.shard(shard.digest).is_dir() and not cache.damaged(shard.digest).exists()
        # Without a commit, it may be what a crash left of another program.
        doubtful = recheck or shard.digest not in named
        if not intact or (doubtful and verify_shard(cache, shard.digest)):
            download_shard(remote, cache, shard.digest, stop=stop)
            intact = False
        if shard.digest not in named:
            write_salvaged(cache, shard.digest)
        tick(shard.bytes)
        return not intact

    fetched = side_by_side(fetch, shards, jobs, stop)
    return [shard for shard, was_fetched in zip(shards, fetched, strict=True) if was_fetched]
