"""Reads of shards in object stores only what is not rows: documents, keys and shard indexes, by range reads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

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
    staging,
    url_in,
)
from prep.cache.shard_check import quick_check
from prep.cache.store import Cache, retire_shard
from prep.errors import CacheError
from prep.fs import atomic
from prep.fs.remote.copies import headers_root
from prep.fs.remote.objects import read_range, size_of
from prep.fs.remote.retry import NEVER, side_by_side
from prep.fs.tree import tree

JOBS = 32  # headers fetched at a time: small requests, which mostly wait


def ensure_headers(cache: Cache, digests: Sequence[str]) -> Cache:
    """A cache that has documents, keys and shard indexes of these shards: `cache` itself unless it is a copy.

    Of a copy, what is lacking is fetched by range reads: some hundred bytes a shard, and its keys. Rows are holes.
    Raises `CacheError` for a shard whose header is damaged in the store, or missing there.
    """
    if cache.original is None:
        return cache
    headers = Cache(root=headers_root(cache.original))
    lacking = [digest for digest in dict.fromkeys(digests) if not headers.shard(digest).is_dir()]
    if lacking:
        make_dirs(headers.root)
        remove_leftovers(headers.root / "tmp")
        stop = threading.Event()
        side_by_side(lambda digest: _keep_header(cache, headers, digest, stop), lacking, JOBS, stop)
    return headers


def _keep_header(cache: Cache, headers: Cache, digest: str, stop: threading.Event) -> None:
    with lock_shard(digest, stop):
        if headers.shard(digest).is_dir():
            return
        for _ in range(TRIES):
            if missing := fetch_header(cache, headers, digest, stop=stop):
                retire_shard(headers, digest)
                raise incomplete(cache, digest, missing[0])
            if not (found := quick_check(headers, digest)):
                return
            retire_shard(headers, digest)
        raise CacheError(f"shard {digest} in {cache.place} is damaged: {found[0].what}", hint=AGAIN)


def fetch_header(cache: Cache, headers: Cache, digest: str, *, stop: threading.Event = NEVER) -> list[str]:
    """Fetches a shard's header as a shard of `headers`, whatever it has in the store; returns the missing files."""
    shard, missing = lookup(cache, digest), list[str]()
    data_files = {shard_format.data_path(spec): spec for spec in shard.arrays}
    with staging(headers) as staged:
        for name, size in shard.files.items():
            url = url_in(cache, digest, name)
            atomic.make_dirs((staged / name).parent)
            try:
                there, start = size + 1, 0  # one byte more, to notice a document that is longer
                if name in data_files:
                    there, start = size_of(url, stop=stop), shard.rows * shard_format.row_stride(data_files[name])
                data = read_range(url, start, min(there, size + 1), stop=stop)
            except FileNotFoundError:
                missing.append(name)
                continue
            with atomic.create(staged / name) as handle:
                handle.seek(start)
                atomic.write(handle, data)
                if name in data_files:
                    handle.truncate(there)
        move_in(headers, staged, digest)
    return missing


def cost_of(shard: RemoteShard) -> tuple[int, int]:
    """How many requests fetch a shard's header, one after another, and how many bytes."""
    index = {shard_format.data_path(spec): shard.rows * shard_format.row_stride(spec) for spec in shard.arrays}
    return (len(shard.files) + len(index),  # of each array, also its size
            sum(size - index.get(name, 0) for name, size in shard.files.items()))


@contextlib.contextmanager
def as_stored(cache: Cache, digest: str, *, rows: bool, stop: threading.Event = NEVER) -> Iterator[Cache]:
    """A cache that has a shard as it is stored now: `cache` itself unless it is a copy.

    Of a copy, the shard is fetched for the time of the block, with all its `rows` or only its header, however damaged
    it is. Raises `CacheError` if the store does not answer, `Stopped`.
    """
    if not cache.fetches:
        yield cache
        return
    scratch = Cache(root=cache.stage())
    try:
        if rows:
            fetch_shard(cache, scratch, digest, check=False, stop=stop)
        else:
            fetch_header(cache, scratch, digest, stop=stop)
        if not any(tree(scratch.shard(digest))):
            atomic.remove_tree(scratch.shard(digest))  # nothing of it is there: it is missing
        yield scratch
    finally:
        atomic.remove_tree(scratch.root)
