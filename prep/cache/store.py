"""Stores a cache as files: defines where each kind of object lies, and opens caches.

    CACHE/latentry.json  shards/ab/ab12…/  tables/ab/ab12….arrow  commits/ab/ab12….json
          plans/ab12….arrow  damaged/ab12….json  tmp/

Only strings of 64 hex digits become paths here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prep.digest import canonical, with_checksum
from prep.errors import CacheError, PathError
from prep.fs import atomic
from prep.fs.paths import MARKER, cache_around, resolve
from prep.fs.place import Place, require_local
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import directory_of
from prep.fs.remote.objects import create_object, delete_object, read_object, replace_object
from prep.fs.remote.retry import NEVER
from prep.fs.untrusted import check_cache_root, check_directories, entries, entries_if_allowed, read_regular
from prep.parse import Unparsed, brief, digest_of, sealed_json

MARKER_BYTES = 1 << 16  # at most
VERSION = 1
Kind = str  # one of SUFFIX
SUFFIX = {"tables": ".arrow", "commits": ".json", "plans": ".arrow", "damaged": ".json"}
FANNED = {"tables", "commits"}  # kinds that can have many files: one directory per two hex digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """An opened cache: a directory with the marker of a cache, or the copies of one in an object store.

    Of such a cache, commits and plans are in the store first, and shards are fetched when they are read.
    """

    root: Path
    store: Bucket | None = None  # where it is; None: in its directory

    @property
    def place(self) -> Place:
        """Where the cache is, for people."""
        return self.store or self.root

    @property
    def unsent(self) -> Cache:
        """The cache whose shards are made here: itself; of a cache in a store, those that wait for their upload."""
        return self if self.store is None else Cache(root=self.root / "unsent")

    @property
    def is_whole(self) -> bool:
        """Whether all its shards are on this computer; those of a store are fetched when they are read."""
        return self.store is None

    @property
    def records_damage(self) -> bool:
        """Whether damage that readers find is recorded, so that the next encode repairs it without --recheck: not in a
        store, of whose shards readers see copies, which are fetched again."""
        return self.store is None

    @property
    def has_lock(self) -> bool:
        """Whether a lock keeps others out while `prep gc` removes something: stores have none."""
        return self.store is None

    def shard(self, digest: str) -> Path:
        """The directory of a shard.

        Raises `CacheError` for anything but 64 hex digits, and if a directory on the path is a link; so do the other
        methods. Whoever opens a file checks the file itself (`prep.fs.untrusted`).
        """
        return Path(self.shard_path(digest))

    def shard_path(self, digest: str) -> str:
        """As `shard`, for thousands of shards: with paths it would take three times as long."""
        return self._directory("shards", digest)

    def header_path(self, digest: str) -> str:
        """As `shard_path`, the directory of a shard's documents and keys: of a shard in a store, it has nothing else.
        """
        return self._directory(self.headers, digest)

    @property
    def headers(self) -> str:
        """The name of the directory below which those are."""
        return "shards" if self.store is None else "headers"

    def _directory(self, kind: str, digest: str) -> str:
        name = _checked(digest)
        top = f"{self.root}{os.sep}{kind}"
        parent = f"{top}{os.sep}{name[:2]}"
        path = f"{parent}{os.sep}{name}"
        check_directories(top, parent, path)
        return path

    def file(self, kind: Kind, digest: str) -> Path:
        """The file of a table, commit, plan or damage record."""
        name = _checked(digest)
        path = self.root / kind / name[:2] / name if kind in FANNED else self.root / kind / name
        check_directories(*((path.parents[1], path.parent) if kind in FANNED else (path.parent,)))
        return path.with_name(name + SUFFIX[kind])

    def table(self, digest: str) -> Path:
        """The file of a table."""
        return self.file("tables", digest)

    def commit(self, digest: str) -> Path:
        """The file of a commit, by its task's key."""
        return self.file("commits", digest)

    def plan(self, digest: str) -> Path:
        """The file of a plan, by the digest of all wanted keys."""
        return self.file("plans", digest)

    def damaged(self, digest: str) -> Path:
        """The file of a damage record, by its shard's digest."""
        return self.file("damaged", digest)

    @property
    def dir_mode(self) -> int:
        """Permissions of directories in the cache: those of its root, so that no user's umask locks others out."""
        return atomic.shared_dir_mode(self.root)

    @property
    def file_mode(self) -> int:
        """Permissions of files in the cache, by the rule of `dir_mode`; files that never change become read-only."""
        return atomic.shared_file_mode(self.root)

    def stage(self) -> Path:
        """Makes a new directory in tmp/."""
        path = self.staging() / secrets.token_hex(16)
        atomic.make_dir(path, mode=self.dir_mode)
        return path

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """A new directory in tmp/, which is gone after the block, unless it was renamed."""
        path = self.stage()
        try:
            yield path
        finally:
            atomic.forget(path)

    def staging(self) -> Path:
        """The directory tmp/, which is made if it is missing; after a crash, its contents are leftovers."""
        self.make_dirs(self.root / "tmp")
        return self.root / "tmp"

    def make_dirs(self, path: Path) -> None:
        """Makes a directory in the cache and its missing parents."""
        if not path.is_dir():
            atomic.make_dirs(path, mode=self.dir_mode)

    def write(self, path: Path, data: atomic.Buffer, *, read_only: bool = False) -> None:
        """Writes a file of the cache atomically."""
        atomic.write_atomic(path, data, read_only=read_only, staging=self.staging(), mode=self.file_mode)

    def create(self, path: Path, data: bytes, *, stop: threading.Event = NEVER) -> bool:
        """Creates a commit or plan atomically; returns False, and writes nothing, if it exists."""
        if self.store is not None and not create_object(self.object(path), data, stop=stop):
            return False
        self.make_dirs(path.parent)
        if atomic.create_exclusive(path, data, staging=self.staging(), mode=self.file_mode):
            return True
        if self.store is not None:  # what is here was in the store once
            self.write(path, data)
        return self.store is not None

    def replace(self, path: Path, data: bytes, *, stop: threading.Event = NEVER) -> None:
        """Writes a commit or plan atomically, whether or not it exists."""
        if self.store is not None:
            replace_object(self.object(path), data, stop=stop)
        atomic.remove_directory_in_way(path)
        self.make_dirs(path.parent)
        self.write(path, data)

    def discard(self, path: Path) -> None:
        """Removes a commit or plan, if it exists."""
        atomic.remove_tree(path)  # first: what another process stores after the next line, it has here, too
        if self.store is not None:
            delete_object(self.object(path))

    def read(self, path: Path, most: int) -> bytes:
        """The bytes of a plan. Raises `FileNotFoundError`, `NotRegularFile`, `Unparsed`, `CacheError`."""
        if self.store is None:
            return read_regular(path, most)
        try:
            data = read_object(self.object(path), most)
        except FileNotFoundError:
            atomic.remove_tree(path)
            raise
        self.make_dirs(path.parent)
        self.write(path, data)
        return data

    def object(self, path: Path) -> str:
        """The URL of the object that a file of a cache in a store is, or would be."""
        return f"{self.store}/{path.relative_to(self.root).as_posix()}"

    def closed(self, kind: Kind) -> list[Path]:
        """The directories of a kind that this user may not list."""
        return [Path(fan.path) for fan in entries(self.root / kind)
                if fan.is_dir(follow_symlinks=False) and not os.access(fan.path, os.R_OK | os.X_OK)]

    def names(self, kind: Kind) -> Iterator[str]:
        """The digests of all files of a kind, sorted; skips other files and `closed` directories."""
        for name in self._listed(kind):
            with contextlib.suppress(Unparsed):
                if name.endswith(SUFFIX[kind]):
                    yield digest_of(name.removesuffix(SUFFIX[kind]), kind)

    def shards(self, kind: str = "shards") -> Iterator[str]:
        """The digests of all shards, or of all whose `headers` are here, sorted; skips `closed` directories."""
        for name in self._listed(kind):
            with contextlib.suppress(Unparsed):
                yield digest_of(name, kind)

    def _listed(self, kind: Kind) -> Iterator[str]:
        """The names below the directory of a kind, sorted; skips linked directories, and names in a wrong directory."""
        folders = entries(self.root / kind)
        if kind in SUFFIX and kind not in FANNED:
            yield from (entry.name for entry in folders)
            return
        for fan in folders:
            if fan.is_dir(follow_symlinks=False):
                yield from (entry.name for entry in entries_if_allowed(Path(fan.path))
                            if entry.name.startswith(fan.name))


def cache_at(place: Place) -> Cache:
    """The cache at a place, to be read, whether or not one is there: a directory, or the copies of one in a store.

    Raises `PathError` for a user without a directory for copies.
    """
    return Cache(root=directory_of(place), store=place if isinstance(place, Bucket) else None)


def open_cache(path: Path, *, create: bool) -> Cache:
    """Opens the cache at `path`; `create` turns a missing or empty directory into one.

    Raises `PathError` if `path` is not a directory or holds something else; `CacheError` if there is no cache, or one
    of another version or with a link in its root.
    """
    require_local(path, "cache")
    marker = path / MARKER
    if path.exists() and not path.is_dir():
        raise PathError(f"{path} is a file, expected a cache directory")
    if not marker.exists():
        _create(path, create)
    check_cache_root(path)
    _check_marker(marker)
    return Cache(root=path)


def check_can_create(path: Path) -> None:
    """Raises `PathError` unless `path` is a cache, or can become one: missing, or an empty directory, in no cache."""
    require_local(path, "cache")
    if path.exists() and not path.is_dir():
        raise PathError(f"{path} is a file, expected a cache directory")
    if path.is_dir() and any(not _is_litter(inner.name) for inner in path.iterdir()) and not (path / MARKER).exists():
        raise PathError(f"{path} is not empty and not a cache: it has no {MARKER}",
                        hint="name a new or empty directory with --cache")
    if (path / MARKER).exists():
        check_cache_root(path)
    elif (outer := cache_around(resolve(path))) is not None:
        raise inside_another(str(path), str(outer))


def inside_another(path: str, outer: str) -> PathError:
    """The error for a new cache at `path` in the cache `outer`, which would not know of it: tmp/ of a cache is emptied,
    and where copies of a cache in a store are counted and removed, nobody looks for those of another one below."""
    return PathError(f"{path} would be a cache in another cache, {outer}", hint="name a place outside that one")


def _is_litter(name: str) -> bool:
    """Whether a directory with this name in it still counts as empty: leftovers, and files of operating systems."""
    return name in ("tmp", ".DS_Store", "Thumbs.db", "desktop.ini", "lost+found")


def new_marker() -> bytes:
    """The marker of a cache of this version."""
    return canonical(with_checksum({"format": "latentry/cache", "version": VERSION}))


def _create(path: Path, create: bool) -> None:
    if not create:
        raise CacheError(f"there is no cache in {path}: it has no {MARKER}",
                         hint="prep encode SOURCE --cache DIR creates one")
    check_can_create(path)
    atomic.make_dirs(path.absolute())
    while not (path / MARKER).exists():
        with contextlib.suppress(FileNotFoundError):  # a quicker process has emptied tmp/: no lock is held yet
            # never replaced: it is the file that is locked
            Cache(root=path.absolute()).create(path.absolute() / MARKER, new_marker())
    atomic.sync_dir(path.absolute().parent)  # also if another process made it: it may have died before its sync


def _check_marker(marker: Path) -> None:
    try:
        document = sealed_json(read_regular(marker, MARKER_BYTES), str(marker))
    except (OSError, Unparsed) as error:
        raise CacheError(f"{marker} cannot be read: {error}") from None
    form, version = document.get("format"), document.get("version")
    if (form, version) != ("latentry/cache", VERSION):
        seen = f"{brief(form)} version {brief(version)}"
        raise CacheError(f"{marker} is {seen}, expected 'latentry/cache' version {VERSION}")


def _checked(digest: str) -> str:
    try:
        return digest_of(digest, "digest")
    except Unparsed as error:
        raise CacheError(str(error)) from None
