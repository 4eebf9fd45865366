"""Finds manifests that use a cache but are not kept, before `prep gc` removes what they need.

A cache does not know its manifests, so only some directories are searched: those of the kept manifests, and the parent
of the cache. Manifests elsewhere are not found.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prep.cache.store import Cache
from prep.errors import CacheError, ManifestError
from prep.fs.untrusted import read_regular
from prep.maintenance.sweep import Sweep
from prep.manifest.document import LIMIT, Manifest, looks_like_manifest, read_manifest
from prep.manifest.tables import SHARDS, read_table

MOST_FILES = 4096  # *.json files that are checked per directory


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherManifest:
    """A manifest of the cache that is not kept and loses shards or tables."""

    path: Path
    shards: int  # needed by it, but removed
    tables: int


def searched_folders(cache: Cache, keep: Sequence[Manifest]) -> tuple[Path, ...]:
    """The directories that `find_others` searches, each once, sorted; it does not search those inside of them."""
    beside = (path for manifest in keep for path in (manifest.path.parent, manifest.folder))
    return tuple(sorted({path.resolve(): path for path in (*beside, cache.root.parent)}.values()))


def find_others(cache: Cache, keep: Sequence[Manifest], sweep: Sweep) -> tuple[OtherManifest, ...]:
    """The manifests that lose shards or tables by `sweep`, sorted by path. Skips what cannot be read."""
    known = {_mark(manifest.path) for manifest in keep}
    shards, tables, found = set(sweep.remove["shards"]), set(sweep.remove["tables"]), []
    for path in _candidates(searched_folders(cache, keep)):
        with contextlib.suppress(OSError, ManifestError, CacheError):
            if _mark(path) in known:
                continue
            known.add(_mark(path))
            manifest = read_manifest(path, fetch=False)
            if not manifest.cache_root.samefile(cache.root):
                continue
            loses = OtherManifest(path=path, shards=len(_shards(cache, manifest) & shards),
                                  tables=len(set(manifest.document["tables"].values()) & tables))
            if loses.shards or loses.tables:
                found.append(loses)
    return tuple(sorted(found, key=lambda one: str(one.path)))


def _candidates(folders: Iterable[Path]) -> Iterator[Path]:
    """Files that start like a manifest; never blocks on a pipe."""
    for folder in folders:
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))  # noqa: PTH208  # quicker
            yield from (folder / name for name in names[:MOST_FILES] if _begins_as_manifest(folder / name))


def _begins_as_manifest(path: Path) -> bool:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= LIMIT:
            return False
        return looks_like_manifest(read_regular(Path(os.path.realpath(path)), LIMIT)[:1024])
    except OSError:
        return False


def _shards(cache: Cache, manifest: Manifest) -> set[str]:
    table = read_table(cache, manifest.document["tables"]["shards"], SHARDS)
    return {digest.as_py().hex() for digest in table["digest"]}


def _mark(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
