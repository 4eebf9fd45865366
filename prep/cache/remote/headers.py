"""Headers of shards in object stores: their documents and keys, which are kept here without their rows.

Both are files as in a shard, in a directory of its own (`Cache.header_path`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from prep.cache import shard_format
from prep.cache.remote.quota import make_dirs, remove_leftovers
from prep.cache.remote.shards import (
    AGAIN,
    TRIES,
    RemoteShard,
    fetch_shard,
    incomplete,
    lock_shard,
    lookup,
    move_in,
    shard_of,
    url_in,
)
from prep.cache.shard_check import quick_check
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.fs import atomic
from prep.fs.remote.objects import read_range, size_of
from prep.fs.remote.retry import NEVER, side_by_side
from prep.fs.tree import tree

JOBS = 32  # headers fetched at a time: small requests, which mostly wait


def ensure_headers(cache: Cache, digests: Sequence[str]) -> None:
    """Makes sure that documents and keys of these shards are here. A cache on this computer has them.

    What is lacking is fetched and checked by range reads, with shard indexes: some hundred bytes a shard, and its keys.
    Raises `CacheError` for a shard whose header is damaged in the store, or missing there.
    """
    if cache.store is None:
        return
    lacking = [digest for digest in dict.fromkeys(digests) if not has_header(cache, digest)]
    if lacking:
        make_dirs(cache.root)
        remove_leftovers(cache.root / "tmp")
        stop = threading.Event()
        side_by_side(lambda digest: _fetch_header(cache, digest, stop), lacking, JOBS, stop)


def has_header(cache: Cache, digest: str) -> bool:
    """Whether the header of a shard in a store is here."""
    return Path(cache.header_path(digest)).is_dir()


def _fetch_header(cache: Cache, digest: str, stop: threading.Event) -> None:
    with lock_shard(digest, stop):
        if has_header(cache, digest):
            return
        for _ in range(TRIES):
            with cache.staged() as scratch:
                stored = Cache(root=scratch)
                if missing := _read_header(cache, stored, digest, stop=stop):
                    raise incomplete(cache, digest, missing[0])
                if not (damages := quick_check(stored, digest)):
                    keep_header(cache, shard_of(stored, digest), keys_of(stored, digest))
                    return
        raise CacheError(f"shard {digest} in {cache.place} is damaged: {damages[0].what}", hint=AGAIN)


def keys_of(cache: Cache, digest: str) -> bytes:
    """The file of a shard's keys. Raises `OSError`."""
    return Path(cache.header_path(digest), shard_format.KEY_PATH).read_bytes()


def keep_header(cache: Cache, shard: RemoteShard, keys: bytes) -> None:
    """Keeps the header of a shard in a store, whose lock is held; `keys` is their file."""
    with cache.staged() as staged:
        for name, data in {**shard.documents, shard_format.KEY_PATH: keys}.items():
            if not (staged / name).parent.is_dir():
                atomic.make_dir((staged / name).parent, mode=cache.dir_mode)
            with atomic.create(staged / name, mode=cache.file_mode) as handle:
                atomic.write(handle, data)
        move_in(cache, staged, Path(cache.header_path(shard.digest)))


def drop_header(cache: Cache, digest: str) -> None:
    """Removes the header of a shard in a store, whose lock is held, if it is here."""
    if has_header(cache, digest):
        with cache.staged() as aside:
            atomic.rename(Path(cache.header_path(digest)), aside / digest)


def _read_header(cache: Cache, into: Cache, digest: str, *, stop: threading.Event = NEVER) -> list[str]:
    """Fetches a shard's documents, keys and shard indexes as a shard whose rows are holes, whatever it has in the
    store; returns the missing files."""
    shard, missing = lookup(cache, digest), list[str]()
    data_files = {shard_format.data_path(spec): spec for spec in shard.arrays}
    with into.staged() as staged:
        for name, size in shard.files.items():
            url = url_in(cache, digest, name)
            atomic.make_dirs((staged / name).parent)
            try:
                end, start = size + 1, 0  # one byte more, to notice a document that is longer
                if name in data_files:
                    end, start = size_of(url, stop=stop), shard.rows * shard_format.row_stride(data_files[name])
                data = read_range(url, start, min(end, size + 1), stop=stop)
            except FileNotFoundError:
                missing.append(name)
                continue
            with atomic.create(staged / name) as handle:
                handle.seek(start)
                atomic.write(handle, data)
                if name in data_files:
                    handle.truncate(end)
        move_in(into, staged, into.shard(digest))
    return missing


def cost_of(shard: RemoteShard) -> tuple[int, int]:
    """How many requests fetch a shard's header, one after another, and how many bytes."""
    index = {shard_format.data_path(spec): shard.rows * shard_format.row_stride(spec) for spec in shard.arrays}
    return (len(shard.files) + len(index),  # of each array, also its size
            sum(size - index.get(name, 0) for name, size in shard.files.items()))


@contextlib.contextmanager
def as_stored(cache: Cache, digest: str, *, rows: bool, stop: threading.Event = NEVER) -> Iterator[Cache]:
    """A cache that has a shard as it is stored now: `cache` itself unless it is in a store.

    From there the shard is fetched for the time of the block, with all its `rows` or only its header, however damaged
    it is. Raises `CacheError` if the store does not answer, `Stopped`.
    """
    if cache.store is None:
        yield cache
        return
    with cache.staged() as root:
        scratch = Cache(root=root)
        if rows:
            fetch_shard(cache, scratch, digest, check=False, stop=stop)
        else:
            _read_header(cache, scratch, digest, stop=stop)
        if not any(tree(scratch.shard(digest))):
            atomic.remove_tree(scratch.shard(digest))  # nothing of it is there: it is missing
        yield scratch
