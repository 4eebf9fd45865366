"""Downloads shards of a cache in a store, to be joined here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prep.cache.remote.quota import QUOTA
from prep.cache.remote.shards import download_shard
from prep.cache.store import Cache
from prep.fs.remote.retry import side_by_side
from prep.progress import Progress

JOBS = 8  # shards downloaded at a time


@contextmanager
def downloaded(cache: Cache, sizes: Mapping[str, int], progress: Progress) -> Iterator[Cache]:
    """A cache on this computer that has these shards, given with their bytes, for the time of the block: `cache` itself
    if it is here, or there are none.

    What is damaged in the store is taken as it is. The shards count as copies, for which there is room, or room is
    made. Raises `CacheError`, `OSError`.
    """
    if cache.store is None or not sizes:
        yield cache
        return
    total, stop = sum(sizes.values()), threading.Event()

    def download(digest: str) -> None:
        download_shard(cache, here, digest, damaged=True, stop=stop)
        tick(sizes[digest])

    with cache.unsent.staged() as root, QUOTA.reserved(total, stop):
        here = Cache(root=root)
        with progress("downloading", total, "bytes") as tick:
            side_by_side(download, list(sizes), JOBS, stop)
        yield here
