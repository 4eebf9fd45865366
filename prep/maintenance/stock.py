"""What a cache has, on a disk or in a store: listed with sizes and times, and removed.

A store has no locks, so a removal there stops for whoever else works there. An encoder that has something to encode has
a plan in the store until its manifest is written: with a plan, nothing is removed. Whoever writes a manifest looks
afterwards whether the store still has commits for all of its shards (`prep.encode.manifest.commits`), and fails if
not. Here commits go first; then, again and again before shards go, kept manifests and plans are read again, and another
one ends it. So either the encoder sees that commits are gone, or this sees its manifest or plan, and leaves the shards.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from prep.cache.ledger.index import drop_index
from prep.cache.publish import clear_leftovers, leftovers, retire_shard
from prep.cache.remote.shards import GROUP
from prep.cache.remote.stored import JOBS
from prep.cache.store import FANNED, SUFFIX, Cache
from prep.errors import CacheError
from prep.fs import atomic
from prep.fs.remote.objects import ObjectEntry, delete_object, list_objects
from prep.fs.remote.retry import side_by_side
from prep.fs.untrusted import is_link
from prep.parse import Unparsed, digest_of
from prep.progress import Tick

KINDS = ("commits", "shards", "tables", "plans", "damaged")  # in order of removal; staging comes last
BATCH = 64  # shards that are removed from a store before manifests and plans are read again


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """A shard, or another file of a cache."""

    written: float  # seconds since 1970, of its last file; infinity if that is not known
    bytes: int
    objects: Mapping[str, ObjectEntry] = field(default_factory=dict)  # in a store, by their names below the cache


Things = Mapping[str, Mapping[str, Thing]]  # by kind and digest; leftovers, of the kind "staging", by path
Names = Mapping[str, Sequence[str]]  # digests by kind


def stock_of(cache: Cache) -> DiskStock | StoreStock:
    """What lists a cache, and removes from it."""
    return DiskStock(cache) if cache.store is None else StoreStock(cache)


# ---- on a disk -------------------------------------------------------------------------------------------------------


class DiskStock:
    """What a cache on this computer has."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def things(self) -> Things:
        """All that is there. Raises `CacheError` for what cannot be listed, because it may state what is needed."""
        for kind in ("shards", *sorted(FANNED)):
            for folder in self._cache.closed(kind):
                raise CacheError(f"{folder} cannot be listed (no permission), so nothing is removed",
                                 hint="run prep gc as a user with read and write access to the whole cache")
        things = {kind: {name: _thing(path) for name, path in _paths(self._cache, kind)} for kind in KINDS}
        return {**things, "staging": {str(path): _thing(path) for path in leftovers(self._cache)}}

    def plans(self) -> Mapping[str, Thing]:
        """The plans alone."""
        return {name: _thing(path) for name, path in _paths(self._cache, "plans")}

    def remove(self, gone: Names, things: Things, unchanged: Callable[[], None], tick: Tick = lambda _: None) -> None:
        """Removes what is named, commits before shards, and leftovers; calls `tick(1)` for each.

        Needs the exclusive lock, and no space; after a crash, everything else is intact, and some garbage may remain.
        """
        if any(gone.values()):
            drop_index(self._cache)
        for kind in KINDS:
            for name in gone[kind]:
                if kind == "shards":
                    retire_shard(self._cache, name)
                else:
                    atomic.remove_tree(self._cache.file(kind, name))
                tick(1)
            for parent in sorted({_path(self._cache, kind, name).parent for name in gone[kind]}):
                atomic.sync_dir(parent)
        clear_leftovers(self._cache)


def _paths(cache: Cache, kind: str) -> Iterator[tuple[str, Path]]:
    """The digests of a kind whose files are at their proper paths, and these."""
    every = cache.shards() if kind == "shards" else cache.names(kind)
    return ((name, path) for name in every if (path := _path(cache, kind, name)).exists())


def _path(cache: Cache, kind: str, name: str) -> Path:
    return cache.shard(name) if kind == "shards" else cache.file(kind, name)


def _thing(path: Path) -> Thing:
    try:
        inner = path / "zarr.json"
        written = max(path.stat().st_mtime, inner.stat().st_mtime if inner.exists() else 0)
    except OSError:
        written = float("inf")
    return Thing(written=written, bytes=_bytes(path))


def _bytes(path: Path) -> int:
    """Total bytes of a file or a directory tree; does not follow links, and counts what cannot be read as 0."""
    total, paths = 0, [path]
    while paths:
        path = paths.pop()
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and not is_link(status):
                with os.scandir(path) as entries:
                    paths += [Path(entry.path) for entry in entries]
            else:
                total += status.st_size
    return total


# ---- in a store ------------------------------------------------------------------------------------------------------


class StoreStock:
    """What a cache in a store has: objects by kind and digest; other objects are nobody's here, and stay."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def things(self) -> Things:
        """All that is there. Raises `StoreError`."""
        return {**self._below(""), "staging": {}}

    def plans(self) -> Mapping[str, Thing]:
        """The plans alone. Raises `StoreError`."""
        return self._below("plans/")["plans"]

    def _below(self, start: str) -> Things:
        """The objects whose names begin so."""
        things: dict[str, dict[str, dict[str, ObjectEntry]]] = {kind: defaultdict(dict) for kind in KINDS}
        for name, entry in list_objects(f"{self._cache.store}/{start}".rstrip("/")).items():
            kind, _, rest = f"{start}{name}".partition("/")
            if kind in things and (digest := _digest_in(self._cache, kind, rest)):
                things[kind][digest][f"{start}{name}"] = entry
        return {kind: {name: Thing(written=max(entry.written for entry in objects.values()),
                                   bytes=sum(entry.size for entry in objects.values()), objects=objects)
                       for name, objects in named.items()} for kind, named in things.items()}

    def remove(self, gone: Names, things: Things, unchanged: Callable[[], None], tick: Tick = lambda _: None) -> None:
        """As that of `DiskStock`, but calls `tick` for several; `unchanged` raises if somebody has begun to need
        something. After an interruption, what is left is found again."""
        unchanged()
        _delete(self._cache, things["commits"], gone["commits"], tick)
        for start in range(0, len(gone["shards"]), BATCH):
            unchanged()
            _delete(self._cache, things["shards"], gone["shards"][start : start + BATCH], tick)
        unchanged()
        for kind in ("tables", "plans"):
            _delete(self._cache, things[kind], gone[kind], tick)


def _digest_in(cache: Cache, kind: str, rest: str) -> str:
    """The digest of what an object of a kind belongs to; "" for one that is none of ours."""
    parts = rest.split("/")
    with contextlib.suppress(Unparsed, IndexError):
        if kind == "shards":
            digest = digest_of(parts[1], kind)
            return digest if rest.startswith(f"{digest[:2]}/{digest}/") else ""
        if kind != "damaged" and parts[-1].endswith(SUFFIX[kind]):
            digest = digest_of(parts[-1].removesuffix(SUFFIX[kind]), kind)
            return digest if f"{kind}/{rest}" == cache.file(kind, digest).relative_to(cache.root).as_posix() else ""
    return ""


def group_of(digest: str) -> str:
    """The name in a store of the document without which a shard does not count."""
    return f"shards/{digest[:2]}/{digest}/{GROUP}"


def _delete(cache: Cache, things: Mapping[str, Thing], names: Iterable[str], tick: Tick) -> None:
    pairs = [(name, object_name) for name in names for object_name in things[name].objects]
    first = [(name, object_name) for name, object_name in pairs if object_name == group_of(name)]
    for part in (first, sorted(set(pairs) - set(first))):
        stop = Event()

        def delete(named: tuple[str, str], stop: Event = stop) -> None:
            delete_object(f"{cache.store}/{named[1]}", stop=stop)

        side_by_side(delete, part, JOBS, stop)
    tick(len({name for name, _ in pairs}))
