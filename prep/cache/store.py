"""A cache as files: where each kind of thing lies, and how it gets there whole or not at all.

    CACHE/latentry.json  shards/ab/ab12…/  tables/ab/ab12….arrow  commits/ab/ab12….json
          plans/ab12….arrow  damaged/ab12….json  tmp/

Only 64 hex digits ever become a path here. Objects are synced before anything names them; a crash leaves
rubbish in tmp/ at most.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prep.digest import canonical, digest_bytes, seal
from prep.errors import CacheError, PathError
from prep.fs import atomic
from prep.fs.paths import MARKER
from prep.fs.tree import file_digest, tree_digest
from prep.fs.untrusted import check_cache_root, check_directories, entries, entries_if_allowed, read_regular
from prep.parse import Unparsed, brief, digest_of, sealed_json

MARKER_BYTES = 1 << 16  # at most
VERSION = 1
Kind = str  # one of SUFFIX
SUFFIX = {"tables": ".arrow", "commits": ".json", "plans": ".arrow", "damaged": ".json"}
# Of earlier versions, in a cache's own directory. Never opened: SQLite deletes files that a journal beside one names.
EARLIER = (*(f"facts.sqlite{end}" for end in ("", "-journal", "-wal", "-shm")), "lookup.bin")
SETTLED = 3600.0  # seconds after which every system has written names by itself; Linux does within 30
FANNED = {"tables", "commits"}  # kinds of which there can be many: two digits make a directory
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """An opened cache: a directory that says it is one."""

    root: Path

    def shard(self, digest: str) -> Path:
        """The directory of a shard.

        Raises `CacheError` for anything but 64 hex digits, and where a link would lead out of the cache; so do the
        others. What the path itself leads to is for whoever opens it (`prep.fs.untrusted`).
        """
        name = _checked(digest)
        path = self.root / "shards" / name[:2] / name
        check_directories(path.parent.parent, path.parent, path)
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
        """Permissions of directories in the cache: those of its own, so that no user's umask shuts others out."""
        return atomic.shared_dir_mode(self.root)

    @property
    def file_mode(self) -> int:
        """Permissions of files in the cache, as `dir_mode`; of what never changes, write permission is removed."""
        return atomic.shared_file_mode(self.root)

    def stage(self) -> Path:
        """A fresh directory in tmp/."""
        path = self.staging() / secrets.token_hex(16)
        atomic.make_dir(path, mode=self.dir_mode)
        return path

    def staging(self) -> Path:
        """The directory tmp/: whatever is in it after a crash is left over."""
        self.make_dirs(self.root / "tmp")
        return self.root / "tmp"

    def make_dirs(self, path: Path) -> None:
        """A directory in the cache, and those above it, exist."""
        if not path.is_dir():
            atomic.make_dirs(path, mode=self.dir_mode)

    def write(self, path: Path, data: atomic.Buffer, *, read_only: bool = False) -> None:
        """Writes a file of the cache, whole or not at all."""
        atomic.write_atomic(path, data, read_only=read_only, staging=self.staging(), mode=self.file_mode)

    def create(self, path: Path, data: atomic.Buffer) -> bool:
        """True when this call created a file of the cache; False, and nothing written, when it was there already."""
        self.make_dirs(path.parent)
        return atomic.create_exclusive(path, data, staging=self.staging(), mode=self.file_mode)

    def closed(self, kind: Kind) -> list[Path]:
        """The directories of a kind that this user may not list, so that what they hold is not seen."""
        return [Path(fan.path) for fan in entries(self.root / kind)
                if fan.is_dir(follow_symlinks=False) and not os.access(fan.path, os.R_OK | os.X_OK)]

    def names(self, kind: Kind) -> Iterator[str]:
        """The digests of every file of a kind, sorted; other files are skipped, and directories that are `closed`."""
        for name in self._listed(kind):
            with contextlib.suppress(Unparsed):
                if name.endswith(SUFFIX[kind]):
                    yield digest_of(name.removesuffix(SUFFIX[kind]), kind)

    def shards(self) -> Iterator[str]:
        """The digests of every shard directory, sorted; `closed` directories are skipped."""
        for name in self._listed("shards"):
            with contextlib.suppress(Unparsed):
                yield digest_of(name, "shards")

    def _listed(self, kind: Kind) -> Iterator[str]:
        """The names below the directory of a kind, in order; links and other files are skipped."""
        found = entries(self.root / kind)
        if kind not in FANNED and kind != "shards":
            yield from (entry.name for entry in found)
            return
        for fan in found:
            if fan.is_dir(follow_symlinks=False):
                yield from (entry.name for entry in entries_if_allowed(Path(fan.path))
                            if entry.name.startswith(fan.name))


def open_cache(path: Path, *, create: bool) -> Cache:
    """The cache at `path`; with `create`, an absent or empty directory becomes one.

    Raises `PathError` when `path` is no directory or holds something else, `CacheError` when there is no cache, one of
    another version, or one with a link in it.
    """
    marker = path / MARKER
    if path.exists() and not path.is_dir():
        raise PathError(f"{path} is a file, expected a cache directory")
    if not marker.exists():
        _create(path, create)
    check_cache_root(path)
    _check_marker(marker)
    return Cache(root=path)


def check_can_create(path: Path) -> None:
    """Raises `PathError` unless `path` is a cache already, or could become one: absent, or an empty directory."""
    if path.exists() and not path.is_dir():
        raise PathError(f"{path} is a file, expected a cache directory")
    if path.is_dir() and any(not _is_litter(inner.name) for inner in path.iterdir()) and not (path / MARKER).exists():
        raise PathError(f"{path} is not empty and not a cache: it has no {MARKER}",
                        hint="name a new or empty directory with --cache")
    if (path / MARKER).exists():
        check_cache_root(path)


def _is_litter(name: str) -> bool:
    """What an empty directory may have: leftovers of writers, and what systems put everywhere."""
    return name in ("tmp", ".DS_Store", "Thumbs.db", "desktop.ini", "lost+found")


def publish_dir(cache: Cache, staged: Path, digest: str) -> Path:
    """Moves a staged and synced shard to its name. A whole one already there stays; a damaged one is replaced.

    What was remembered of damage is forgotten either way.
    """
    _move_in(cache, staged, digest)
    atomic.remove_tree(cache.damaged(digest))
    return cache.shard(digest)


def _move_in(cache: Cache, staged: Path, digest: str) -> None:
    target = cache.shard(digest)
    cache.make_dirs(target.parent)
    if target.exists() and not _is_whole(target, digest):
        _move_out(cache, target)
    try:
        if not target.exists():
            atomic.rename(staged, target)
    except OSError:
        if not _is_whole(target, digest):  # else another process was quicker with the same bytes
            raise
    atomic.remove_tree(staged)
    atomic.sync_dir(target.parent)  # also after another's rename: it may have died before its own


def _move_out(cache: Cache, target: Path) -> None:
    """Takes a shard out of sight in one step, then off the disk.

    A full disk may have no room for another name: then the shard is removed where it is, its first document first.
    """
    aside = cache.root / "tmp" / secrets.token_hex(16)
    try:
        cache.staging()
        atomic.rename(target, aside)
        atomic.sync_dir(target.parent)
    except FileNotFoundError:  # another process was quicker
        return
    except OSError as error:
        if error.errno not in FULL:
            raise
        aside = target
    atomic.remove_tree(aside)


def publish_table(cache: Cache, data: atomic.Buffer) -> str:
    """Puts `data` at the digest of its bytes, read-only, and returns that; a damaged file already there is replaced."""
    digest = digest_bytes(data)
    target = cache.table(digest)
    cache.make_dirs(target.parent)
    if _is_whole(target, digest, file_digest):
        atomic.sync_dir(target.parent)  # its writer may have died before it did
    else:
        atomic.remove_directory_in_way(target)
        cache.write(target, data, read_only=True)
    return digest


def retire_shard(cache: Cache, digest: str) -> None:
    """Removes a shard and its damage record: first out of sight in one step, then from the disk."""
    target = cache.shard(digest)
    if target.exists():
        _move_out(cache, target)
    atomic.remove_tree(cache.damaged(digest))


def sync_recent_directories(cache: Cache) -> None:
    """Every name that appeared lately is on the disk when this returns, also where its writer died before it was.

    Without it a run could build on what a killed one did, and a power cut take that away from under it.
    """
    since = time.time() - SETTLED
    folders = [cache.root, *(cache.root / kind for kind in ("shards", *SUFFIX))]
    for folder in [*folders, *(cache.root / "shards").glob("??"), *(cache.root / "commits").glob("??")]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if folder.stat().st_mtime > since:
                atomic.sync_dir(folder)


def leftovers(cache: Cache) -> list[Path]:
    """What crashes left in tmp/, and files of earlier versions, which nothing reads any more. Raises `OSError`."""
    staged = [Path(entry.path) for entry in entries(cache.root / "tmp")]
    return staged + [path for name in EARLIER if os.path.lexists(path := cache.root / name)]


def clear_leftovers(cache: Cache) -> None:
    """Removes tmp/ and files of earlier versions. Only for whoever has the cache alone; what cannot be removed stays.
    """
    for name in ("tmp", *EARLIER):
        with contextlib.suppress(OSError):  # another user's, say, or a marker in the making
            atomic.remove_tree(cache.root / name)


def _create(path: Path, create: bool) -> None:
    if not create:
        raise CacheError(f"{path} is not a cache: it has no {MARKER}", hint="prep encode SOURCE --cache DIR makes one")
    check_can_create(path)
    marker = canonical(seal({"format": "latentry/cache", "version": VERSION}))
    atomic.make_dirs(path.absolute())
    while not (path / MARKER).exists():
        with contextlib.suppress(FileNotFoundError):  # whoever was quicker has emptied tmp/ since: no lock is held yet
            Cache(root=path.absolute()).create(path / MARKER, marker)  # never replaced: it is what locks are on
    atomic.sync_dir(path.absolute().parent)  # also after another's making of it: that may have died before its own


def _check_marker(marker: Path) -> None:
    try:
        document = sealed_json(read_regular(marker, MARKER_BYTES), str(marker))
    except (OSError, Unparsed) as error:
        raise CacheError(f"{marker} cannot be read: {error}") from None
    form, version = document.get("format"), document.get("version")
    if (form, version) != ("latentry/cache", VERSION):
        seen = f"{brief(form)} version {brief(version)}"
        raise CacheError(f"{marker} is {seen}, expected 'latentry/cache' version {VERSION}")


def _is_whole(target: Path, digest: str, digest_of_all: Callable[[Path], str] = tree_digest) -> bool:
    try:
        return digest_of_all(target) == digest
    except OSError:
        return False


def _checked(digest: str) -> str:
    try:
        return digest_of(digest, "digest")
    except Unparsed as error:
        raise CacheError(str(error)) from None
