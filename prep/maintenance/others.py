"""Finds manifests that use a cache but are not kept, before `prep gc` removes what they need.

A cache does not know its manifests, so only some directories are searched, or prefixes of a store: those of the kept
manifests, and the parent of the cache. Manifests elsewhere are not found.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from prep.cache.remote.documents import fetch_tables
from prep.cache.store import Cache
from prep.errors import CacheError, ManifestError, PathError
from prep.formatting import printable
from prep.fs.paths import resolve
from prep.fs.place import Place, is_directory, mark_of, place_of
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.errors import StoreError
from prep.fs.remote.retry import side_by_side
from prep.fs.remote.storage import files_in, read_start
from prep.maintenance.sweep import Sweep
from prep.manifest.document import LIMIT, Manifest, looks_like_manifest, read_manifest
from prep.manifest.tables import SHARDS, read_table

MOST_FILES = 4096  # *.json files that are checked per directory
START = 1024  # bytes of a file that tell whether it is a manifest
JOBS = 32  # objects looked at side by side: small requests, which mostly wait
_REPLACED = re.compile(r".+\.replaced-[0-9a-f]{12}", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherManifest:
    """A manifest of the cache that is not kept and loses shards or tables."""

    path: Place
    shards: int  # needed by it, but removed
    tables: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Others:
    """What `find_others` found, and where it looked."""

    manifests: tuple[OtherManifest, ...]  # sorted by path
    searched: tuple[Place, ...]  # directories and prefixes, each once, sorted; not those inside of them
    notices: tuple[str, ...]  # on places that could not be searched


def find_others(cache: Cache, keep: Sequence[Manifest], sweep: Sweep) -> Others:
    """The manifests that lose shards or tables by `sweep`. Skips what cannot be read, and says which places and names
    of a store."""
    known, losing = {mark_of(manifest.path) for manifest in keep}, list[OtherManifest]()
    searched, notices = list[Place](), list[str]()
    for folder in _folders(cache, keep):
        try:
            names = _candidates(folder, lambda name: name.endswith(".json"))
            searched.append(folder)
        except StoreError as error:
            notices.append(f"note: other manifests were not searched for in {folder}: {error.message}")
            continue
        bad = [name for name in names if not _is_nameable(folder / name)]
        notices += [f"note: {folder}/{printable(name)} begins like a manifest, but has a name that no URL can "
                    "have (with ?, # or a backslash), so it was not read: rename it, then run prep gc again"
                    for name in bad]
        for path in (folder / name for name in names if name not in bad):
            with contextlib.suppress(OSError, ManifestError, CacheError):
                if (mark := mark_of(path)) not in known:
                    known.add(mark)
                    losing += _losing(cache, read_manifest(path, fetch=False), sweep)
    return Others(manifests=tuple(sorted(losing, key=lambda other: str(other.path))), searched=tuple(searched),
                  notices=tuple(notices))


def is_of(manifest: Manifest, cache: Cache) -> bool:
    """Whether a manifest is of a cache."""
    try:
        return mark_of(manifest.cache) == mark_of(cache.place)
    except OSError:
        return False


def replaced_name(manifest: Manifest) -> Path | None:
    """Where a manifest is kept when another one replaces it: not as `*.json`, so that `--keep *.json` does not name it.
    Stores keep none.
    """
    if isinstance(manifest.path, Bucket):
        return None
    return manifest.path.with_name(f"{manifest.path.name}.replaced-{manifest.digest[:12]}")


def replaced_in(folders: Iterable[Place], cache: Cache) -> Iterator[Path]:
    """Replaced manifests of a cache directly in these directories; none are kept in a store."""
    for folder in filter(is_directory, folders):
        for path in (folder / name for name in _candidates(folder, _REPLACED.fullmatch)):
            with contextlib.suppress(OSError, ManifestError, CacheError):
                if not path.is_symlink() and is_of(read_manifest(path, fetch=False), cache):
                    yield path


def _folders(cache: Cache, keep: Sequence[Manifest]) -> list[Place]:
    """The places to search, each once, sorted."""
    places = [cache.place.parent, *(place for manifest in keep for place in (manifest.path.parent, manifest.base))]
    folders = {str(resolve(place)): place for place in places}
    return [folders[name] for name in sorted(folders)]


def _candidates(folder: Place, wanted: Callable[[str], object]) -> list[str]:
    """The names that are `wanted` of files or objects directly in a place that start like a manifest; never blocks on
    a pipe. Raises `StoreError`."""
    stop = Event()
    try:
        names = [name for name, size in files_in(folder, wanted, MOST_FILES).items() if 0 < size <= LIMIT]
    except OSError:
        return []

    def begins(name: str) -> bool:
        try:
            return looks_like_manifest(read_start(folder / name, START, stop=stop))
        except OSError:  # removed since it was listed, or not to be read
            return False

    return [name for name, good in zip(names, side_by_side(begins, names, JOBS, stop), strict=True) if good]


def _is_nameable(place: Place) -> bool:
    """Whether a person can name what was listed: in a store, not what has ?, # or a backslash in its key."""
    try:
        return place_of(str(place)) == place
    except PathError:
        return False


def _losing(cache: Cache, manifest: Manifest, sweep: Sweep) -> Iterator[OtherManifest]:
    """A manifest, if it is of the cache and loses something. Raises `CacheError`."""
    if is_of(manifest, cache):
        tables = manifest.document["tables"]
        fetch_tables(cache.place, [tables["shards"]])
        shards = read_table(cache, tables["shards"], SHARDS)
        lost = {digest.as_py().hex() for digest in shards["digest"]} & set(sweep.remove["shards"])
        loses = OtherManifest(path=manifest.path, shards=len(lost),
                              tables=len(set(tables.values()) & set(sweep.remove["tables"])))
        if loses.shards or loses.tables:
            yield loses
