"""Local copies of a cache in an object store: whole shards, each fetched once per computer and checked by its digest.

Copies lie where `prep.fs.remote.copies` says, as in any cache, so what reads caches reads them unchanged. They come
when they are first needed. A shard's files follow from the manifest's table of shards (`register`), so nothing is ever
listed. Files are not synced to the disk: what a power failure spoils does not match its checksum, and is fetched again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.arrays import ArraySpec
from prep.cache import shard_format
from prep.cache.publish import FULL, publish_dir, retire_shard
from prep.cache.remote.quota import QUOTA, NotFetched, make_dirs
from prep.cache.shard_header import read_documents
from prep.cache.store import Cache
from prep.digest import digest_bytes
from prep.errors import CacheError
from prep.fs import atomic
from prep.fs.lock import try_exclusive
from prep.fs.remote.copies import LOCKS, mirror
from prep.fs.remote.errors import Stopped
from prep.fs.remote.objects import read_range, stream
from prep.fs.remote.retry import NEVER
from prep.fs.tree import listing_digest, tree_bytes

GROUP = "zarr.json"  # written last of a shard's files: where it is, the shard is whole
TRIES = 3  # downloads of a shard whose bytes do not match its digest
AGAIN = ("upload it again from where it was made: prep push MANIFEST URL --recheck sends what is missing or damaged; "
         "if it was encoded into the store, run that prep encode again with --recheck")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteShard:
    """What a manifest says of a shard: enough to name its files."""

    digest: str
    field: str
    rows: int
    bytes: int
    arrays: tuple[ArraySpec, ...]

    @property
    def documents(self) -> dict[str, Any]:
        """POSIX path and `bytes` of each document."""
        return {GROUP: shard_format.group_document(self.field),
                f"{shard_format.KEY}/zarr.json": shard_format.key_document(self.rows),
                **{f"{spec.name}/zarr.json": shard_format.array_document(spec, self.rows) for spec in self.arrays}}

    @property
    def files(self) -> dict[str, int]:
        """POSIX path and size in bytes of each file."""
        return {**{name: len(data) for name, data in self.documents.items()},
                shard_format.KEY_PATH: self.rows * shard_format.KEY_BYTES + shard_format.CRC_BYTES,
                **{shard_format.data_path(spec): shard_format.data_bytes(spec, self.rows) for spec in self.arrays}}


_learned: dict[Path, dict[str, RemoteShard]] = {}  # of the copies of each cache, what manifests said of its shards


def register(cache: Cache, shards: Iterable[RemoteShard]) -> None:
    """Notes what a manifest says of shards, if `cache` is in a store: from then on they can be fetched."""
    if cache.store is not None:
        _learned.setdefault(cache.root, {}).update({shard.digest: shard for shard in shards})


class Fetcher:
    """Fetches whole shards of a cache in a store. Threads and processes may do so at the same time: each comes once.

    A cache on this computer has all of its shards: nothing is fetched.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._described: dict[str, dict[str, tuple[ArraySpec, int]]] = {}

    def ensure(self, digest: str, *, stop: threading.Event = NEVER) -> bool:
        """Makes sure that a shard is here, without recorded damage; returns whether it had to be fetched.

        Raises `CacheError`, also if there is no room, and `Stopped`.
        """
        if self.touch(digest):
            return False
        with lock_shard(digest, stop):
            if self._has(digest):
                return False
            retire_shard(self._cache, digest)
            fetch_shard(self._cache, self._cache, digest, stop=stop)
        return True

    def touch(self, digest: str) -> bool:
        """Whether a shard is here, without recorded damage. Its copy then counts as used last now."""
        if self._cache.store is None:
            return True
        if not self._has(digest):
            return False
        with contextlib.suppress(OSError):
            os.utime(self._cache.shard(digest))
        return True

    def row(self, digest: str, array: str, row: int) -> tuple[ArraySpec, bytes]:
        """A row as the store has it, by one range read, for what needs few of a shard's. Raises `CacheError`."""
        shard = lookup(self._cache, digest)
        spec = next((spec for spec in shard.arrays if spec.name == array), None)
        if spec is None or not 0 <= row < shard.rows:
            raise CacheError(f"shard {digest} has no row {row} of an array '{array}'", hint=AGAIN)
        name, stride = shard_format.data_path(spec), shard_format.row_stride(spec)
        for _ in range(TRIES):
            try:
                data = read_range(url_in(self._cache, digest, name), row * stride, (row + 1) * stride)
            except FileNotFoundError:
                raise incomplete(self._cache, digest, name) from None
            except OSError:  # it ends before that row
                break
            if shard_format.crc_bytes(data[: spec.row_bytes]) == data[spec.row_bytes :]:
                return spec, data[: spec.row_bytes]
        raise CacheError(f"shard {digest} in {self._cache.place} is damaged: row {row} of '{array}' does not "
                         "match its checksum", hint=AGAIN)

    def bytes_of(self, digest: str) -> int:
        """The size of a shard in bytes, as the manifest says."""
        return lookup(self._cache, digest).bytes

    def _has(self, digest: str) -> bool:
        return self._cache.shard(digest).is_dir() and not self.is_damaged(digest)

    def is_damaged(self, digest: str) -> bool:
        """Whether a reader found damage in the copy of a shard."""
        return self._cache.store is not None and self._cache.damaged(digest).exists()

    def described(self, digest: str, array: str) -> tuple[ArraySpec, int] | None:
        """The dtype and shape of a row, and the number of rows, as the header of a shard in a store says, if that is
        here."""
        if self._cache.store is None:
            return None
        try:
            return self._arrays(digest).get(array)
        except CacheError:
            return None

    def size(self, digest: str, *, seen: int | None = None) -> int:
        """The total size of a shard's files; of one in a store, as its header says. `seen`: of those that are here of
        its header, if they have been looked at. Raises `CacheError`, `FileNotFoundError`, `NotRegularFile`."""
        files = tree_bytes(Path(self._cache.header_path(digest))) if seen is None else seen
        if self._cache.store is None:
            return files
        return files + sum(shard_format.data_bytes(spec, rows) for spec, rows in self._arrays(digest).values())

    def _arrays(self, digest: str) -> dict[str, tuple[ArraySpec, int]]:
        """What the header of a shard in a store says of its arrays, read once. Raises `CacheError`."""
        if digest not in self._described:
            _, rows, arrays = read_documents(self._cache, digest)
            self._described[digest] = {spec.name: (spec, rows) for spec in arrays}
        return self._described[digest]


def fetch_shard(remote: Cache, into: Cache, digest: str, *, check: bool = True, stop: threading.Event = NEVER) -> None:
    """Fetches a shard of a cache in a store into `into`, and checks its digest.

    That is among the copies, too: there is room in it, or room is made. Nothing is half-visible: the shard is renamed
    to its name when all of it is there. `check` is False: a damaged shard is kept as the store has it, without files
    that are missing. Raises `CacheError`, `Stopped`.
    """
    shard, attempt = lookup(remote, digest), 0
    while attempt < TRIES:
        try:
            with QUOTA.reserved(shard.bytes, stop), into.staged() as staged:
                downloaded = _download(remote, shard, staged, check, stop)
                if not check or downloaded == digest:
                    move_in(into, staged, into.shard(digest))
                    return
            attempt += 1
        except OSError as error:
            if error.errno not in FULL:
                raise
            QUOTA.full(shard.bytes)
    raise _spoiled(remote, digest)


def download_shard(remote: Cache, into: Cache, digest: str, *, damaged: bool = False, stop: threading.Event = NEVER
                   ) -> None:
    """Fetches a shard of a cache in a store into a cache that is no copy: synced to the disk.

    With `damaged`, one that is damaged in the store is taken as it is, for a while. Raises `CacheError`, `Stopped`, and
    `OSError`, also for a full disk.
    """
    shard = lookup(remote, digest)
    for retries in range(TRIES - 1, -1, -1):
        with into.staged() as staged:
            downloaded = _download(remote, shard, staged, check=True, stop=stop, sync=not damaged)
            if downloaded == digest or (damaged and not retries):
                publish_dir(into, staged, digest)
                return
    raise _spoiled(remote, digest)


def _spoiled(remote: Cache, digest: str) -> NotFetched:
    return NotFetched(f"shard {digest} in {remote.place} is damaged: its bytes do not match its digest "
                      f"(downloaded {TRIES} times)", hint=AGAIN)


def _download(remote: Cache, shard: RemoteShard, staged: Path, check: bool, stop: threading.Event,
              sync: bool = False) -> str:
    """Downloads a shard's files and returns the digest of what came."""
    listing: list[dict[str, Any]] = []
    for name, size in shard.files.items():
        atomic.make_dirs((staged / name).parent)
        running, at, url = hashlib.sha256(), 0, url_in(remote, shard.digest, name)
        try:
            with atomic.create(staged / name) as handle:
                for part in stream(url, size if check else 2 * size, stop=stop):
                    atomic.write(handle, part)
                    running.update(part)
                    at += len(part)
                if sync:
                    atomic.sync(handle)
        except FileNotFoundError as error:
            if error.filename != url:
                raise
            if check:
                raise incomplete(remote, shard.digest, name) from None
            atomic.remove(staged / name)
            continue
        if sync:
            atomic.sync_dir((staged / name).parent)
        listing.append({"path": name, "size": at, "sha256": running.hexdigest()})
    return listing_digest(listing)


def incomplete(cache: Cache, digest: str, name: str) -> NotFetched:
    """The error for a shard that lacks a file in the store."""
    return NotFetched(f"shard {digest} in {cache.place} is missing or incomplete: it has no {name}", hint=AGAIN)


def move_in(cache: Cache, staged: Path, target: Path) -> None:
    """Renames a staged shard or header to its name; one that is there already has the same bytes."""
    cache.make_dirs(target.parent)
    try:
        atomic.rename(staged, target)
    except OSError:
        if not target.is_dir():
            raise
        atomic.remove_tree(staged)


def lookup(cache: Cache, digest: str) -> RemoteShard:
    """What a manifest or its header says of a shard in a store. Raises `CacheError`."""
    if (shard := _learned.get(cache.root, {}).get(digest)) is not None:
        return shard
    try:
        return shard_of(cache, digest)
    except CacheError:
        raise CacheError(f"shard {digest} is not in the table of shards of any manifest that was read here",
                         hint=AGAIN) from None


def shard_of(cache: Cache, digest: str) -> RemoteShard:
    """What the documents of a shard say. Raises `CacheError`."""
    field, rows, arrays = read_documents(cache, digest)
    shard = RemoteShard(digest=digest, field=field, rows=rows, bytes=0, arrays=arrays)
    return replace(shard, bytes=sum(shard.files.values()))


def url_in(cache: Cache, digest: str, name: str) -> str:
    """The URL of a file of a shard."""
    return f"{cache.place}/shards/{digest[:2]}/{digest}/{name}"


@contextlib.contextmanager
def lock_shard(digest: str, stop: threading.Event) -> Iterator[None]:
    """Holds the lock of a shard, which the kernel releases if the process ends. Raises `Stopped`."""
    folder = mirror() / LOCKS
    make_dirs(folder)
    with (folder / digest[:3]).open("ab") as handle:
        while (release := try_exclusive(handle)) is None:
            if stop.wait(0.02):
                raise Stopped
        try:
            yield
        finally:
            release()


def lock_copy(path: Path, stop: threading.Event) -> contextlib.AbstractContextManager[None]:
    """Holds the lock of any other copy, by its path, as `lock_shard` does for shards. Never inside another lock."""
    return lock_shard(digest_bytes(os.fsencode(path)), stop)
