"""Shards that were made here of a cache in an object store, until it has them.

A shard is uploaded, read back, and only then named by a commit, which is created on the condition that there is none
(`prep.cache.ledger.ledger.write_commit`). Then it is one of the copies, if there is room.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from prep.cache.publish import publish_dir, retire_shard
from prep.cache.remote.headers import has_header, keep_header, keys_of
from prep.cache.remote.quota import QUOTA
from prep.cache.remote.shards import Fetcher, lock_shard, move_in, shard_of
from prep.cache.remote.stored import files_of
from prep.cache.remote.upload import Uploader
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.fs.remote.retry import NEVER
from prep.fs.tree import tree_bytes

AGAIN = "run the same command again; finished work is kept"


def publish_shard(cache: Cache, staged: Path, digest: str, *, stop: threading.Event = NEVER) -> None:
    """Moves a staged and synced shard to its name, as `publish_dir` does; of a cache in a store, to those that wait for
    their upload. Raises `Stopped`."""
    if cache.store is None:
        publish_dir(cache, staged, digest)
        return
    with lock_shard(digest, stop):
        publish_dir(cache.unsent, staged, digest)


def upload_shard(cache: Cache, digest: str, *, stop: threading.Event = NEVER) -> None:
    """Makes sure that the store of a cache has a shard that was encoded here, and that its header is known.

    Raises `CacheError`, `Stopped`.
    """
    if cache.store is None:
        return
    with lock_shard(digest, stop):
        # Another process may have encoded the same, and be done with it.
        made = cache.unsent if cache.unsent.shard(digest).is_dir() else cache
        shard, uploaded = shard_of(made, digest), files_of(cache, digest, stop)
        if uploaded != shard.files:  # its group document comes last
            Uploader(made, str(cache.store), repair=AGAIN, stop=stop).shard(shard, shard.files.keys() - uploaded.keys())
        if not has_header(cache, digest):
            keep_header(cache, shard, keys_of(made, digest))


def settle(cache: Cache, digest: str) -> None:
    """Makes an uploaded shard one of the copies if there is room, else it goes. Caches on this computer keep theirs."""
    if cache.store is None:
        return
    with lock_shard(digest, NEVER):
        made = cache.unsent.shard(digest)
        if not made.is_dir():  # another process has done it
            return
        if not Fetcher(cache).touch(digest) and _has_room(tree_bytes(made)):
            retire_shard(cache, digest)
            move_in(cache, made, cache.shard(digest))
        retire_shard(cache.unsent, digest)


def _has_room(size: int) -> bool:
    try:
        QUOTA.make(size)
    except CacheError:
        return False
    return True


def orphans(cache: Cache, known: Container[str]) -> list[str]:
    """The shards made here that are not among the `known` ones, which commits name."""
    made = list(cache.unsent.shards())
    for digest in made:
        if digest in known:
            settle(cache, digest)  # a process died before it did
    return [digest for digest in made if digest not in known]


@contextmanager
def rows_kept(cache: Cache, digest: str) -> Iterator[bool]:
    """Whether a shard made here is still where it was made, from where no process moves it until the block ends."""
    if cache.store is None:
        yield True
        return
    with lock_shard(digest, NEVER):
        yield cache.unsent.shard(digest).is_dir()


def upload_table(cache: Cache, digest: str) -> None:
    """Makes sure that the store of a cache has a table that was made here. Raises `CacheError`."""
    if cache.store is not None:
        Uploader(cache, str(cache.store), repair=AGAIN).table(digest)
