"""Finds manifests that use a cache but are not kept, before `prep gc` removes what they need.

A cache does not know its manifests, so only some directories are searched, or prefixes of a store: those of the kept
manifests, and the parent of the cache. Manifests elsewhere are not found.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from prep.cache.remote.documents import fetch_tables
from prep.cache.store import Cache, cache_at
from prep.errors import CacheError, ManifestError, PathError
from prep.formatting import printable
from prep.fs.paths import resolve
from prep.fs.place import Place, require_disk
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import list_folder, read_range
from prep.fs.remote.retry import side_by_side
from prep.fs.untrusted import read_regular
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
    """What `find_others_in_store` found, and where it looked."""

    found: tuple[OtherManifest, ...]
    searched: tuple[Place, ...]
    notices: tuple[str, ...]  # on places that could not be searched


def searched_folders(cache: Cache, keep: Sequence[Manifest]) -> tuple[Path, ...]:
    """The directories that `find_others` searches, each once, sorted; it does not search those inside of them."""
    beside = (path for manifest in keep for path in (manifest.path.parent, manifest.folder))
    places = (path for path in (*beside, cache.root.parent) if isinstance(path, Path))
    return tuple(sorted({path.resolve(): path for path in places}.values()))


def find_others(cache: Cache, keep: Sequence[Manifest], sweep: Sweep) -> tuple[OtherManifest, ...]:
    """The manifests that lose shards or tables by `sweep`, sorted by path. Skips what cannot be read."""
    known = {_mark(manifest.path) for manifest in keep if isinstance(manifest.path, Path)}
    found: list[OtherManifest] = []
    for path in _candidates(searched_folders(cache, keep)):
        with contextlib.suppress(OSError, ManifestError, CacheError):
            if _mark(path) in known:
                continue
            known.add(_mark(path))
            manifest = read_manifest(path, fetch=False)
            if manifest.cache_root.samefile(cache.root):
                found += _losing(path, manifest, sweep)
    return tuple(sorted(found, key=lambda one: str(one.path)))


def find_others_in_store(cache: Cache, keep: Sequence[Manifest], sweep: Sweep) -> Others:
    """As `find_others`, of a cache in a store. Skips places that may not be listed, and says so."""
    assert cache.store is not None
    folders = {str(folder): folder for folder in (cache.store.parent, *(one for manifest in keep
                                                                        for one in _folders(manifest)))}
    known, found = {str(resolve(one.path)) for one in keep}, list[OtherManifest]()
    searched, notices = list[Place](), list[str]()
    for name, folder in sorted(folders.items()):
        try:
            names = _stored_candidates(folder) if isinstance(folder, Bucket) else [
                one.name for one in _candidates([folder])]
            searched.append(folder)
        except StoreError as error:
            notices.append(f"note: other manifests were not searched for in {name}: {error.message}")
            continue
        bad = [name for name in names if isinstance(folder, Bucket) and not _is_nameable(folder / name)]
        notices += [f"note: {folder}/{printable(name)} begins like a manifest, but has a name that no URL can "
                    "have (with ?, # or a backslash), so it was not read: rename it, then run prep gc again"
                    for name in bad]
        for path in (folder / name for name in names if name not in bad):
            with contextlib.suppress(OSError, ManifestError, CacheError):
                if str(resolve(path)) in known:
                    continue
                known.add(str(resolve(path)))
                manifest = read_manifest(path, fetch=False)
                if manifest.cache == cache.store:
                    fetch_tables(manifest.cache, [manifest.document["tables"]["shards"]])
                    found += _losing(path, manifest, sweep)
    return Others(found=tuple(sorted(found, key=lambda one: str(one.path))), searched=tuple(searched),
                  notices=tuple(notices))


def replaced_name(manifest: Manifest) -> Path:
    """Where a manifest is kept when another one replaces it: not as `*.json`, so that `--keep *.json` does not name it.
    """
    return require_disk(manifest.path).with_name(f"{manifest.path.name}.replaced-{manifest.digest[:12]}")


def replaced_in(folders: Iterable[Path], cache: Cache) -> Iterator[Path]:
    """Replaced manifests of a cache directly in these directories."""
    for folder in folders:
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(folder))  # noqa: PTH208  # quicker
            yield from (folder / name for name in names if _REPLACED.fullmatch(name) and _is_of(folder / name, cache))


def _is_of(path: Path, cache: Cache) -> bool:
    with contextlib.suppress(OSError, ManifestError, CacheError):
        return (not path.is_symlink() and _begins_as_manifest(path)
                and read_manifest(path, fetch=False).cache_root.samefile(cache.root))
    return False


def _folders(manifest: Manifest) -> tuple[Place, ...]:
    """The directories of a kept manifest, or its prefix in a store."""
    return (manifest.path.parent,) if isinstance(manifest.path, Bucket) else (
        manifest.path.parent.resolve(), manifest.folder.resolve())


def _stored_candidates(folder: Bucket) -> list[str]:
    """The names of objects directly below a place that start like a manifest. Raises `StoreError`."""
    stop = Event()
    names = [name for name, size in list_folder(folder.url).items() if name.endswith(".json") and 0 < size <= LIMIT]

    def begins(name: str) -> bool:
        try:
            return looks_like_manifest(read_range((folder / name).url, 0, START, stop=stop))
        except FileNotFoundError:  # removed since it was listed
            return False

    names = names[:MOST_FILES]
    return [name for name, good in zip(names, side_by_side(begins, names, JOBS, stop), strict=True) if good]


def _is_nameable(place: Bucket) -> bool:
    """Whether a URL that is given can name an object that was listed: not one with ?, # or a backslash in its key."""
    try:
        return Bucket.parse(str(place)) == place
    except PathError:
        return False


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
        return looks_like_manifest(read_regular(Path(os.path.realpath(path)), LIMIT)[:START])
    except OSError:
        return False


def _losing(path: Place, manifest: Manifest, sweep: Sweep) -> Iterator[OtherManifest]:
    """A manifest of the cache, if it loses something. Raises `CacheError`."""
    tables = manifest.document["tables"]
    shards = read_table(cache_at(manifest.cache), tables["shards"], SHARDS)
    lost = {digest.as_py().hex() for digest in shards["digest"]} & set(sweep.remove["shards"])
    loses = OtherManifest(path=path, shards=len(lost), tables=len(set(tables.values()) & set(sweep.remove["tables"])))
    if loses.shards or loses.tables:
        yield loses


def _mark(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
