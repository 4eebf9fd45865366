"""Fetches shards of a cache in an object store in the order in which training reads them, before it reads them.

`bytes_by_node` says how much that is on each of several computers in an epoch; `bytes_by_part`, in all.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np

from prep.batching.plan import StepPlan
from prep.cache.ledger.columns import Column
from prep.cache.remote.quota import quota
from prep.cache.remote.shards import Fetcher
from prep.fs.remote.errors import Stopped
from prep.loader.draws import BatchRequest, ranks_of
from prep.loader.index import Index
from prep.loader.rows import Rows

JOBS = 8  # shards downloaded at a time
AHEAD = 64  # requests whose shards may be on their way; the first few of an epoch need most shards of a bucket
# Shards of the waiting requests of all processes of a computer take no more than one part in so many of the room, so
# that none is removed.
SHARE = 2
LOOK = 0.2  # seconds between looks whether the batches are still wanted
FRESH = 30.0  # seconds for which a shard that was there counts as being there, and as used


def prefetched(rows: Rows, requests: Iterator[BatchRequest], *, masked: bool, sharing: int = 1,
               ended: Callable[[], bool] = lambda: False) -> Iterator[BatchRequest]:
    """Yields each request once its shards are local; prefetches those of the next ones. A local cache has all of them.

    Downloads begin up to `AHEAD` requests early, in their order. `sharing`: how many processes like this one share the
    room for copies. A shard that was removed since, to make room for others, is fetched again by the reader. No more
    requests come once `ended()` is true. Raises `CacheError`.
    """
    if rows.index.cache.is_whole:
        yield from requests
        return
    with _Downloads(rows, rows.reader.fetcher, sharing, ended) as downloads, suppress(Stopped):
        waiting: deque[tuple[BatchRequest, set[str]]] = deque()
        for request in requests:
            shards = rows.shards_of(request, masked)
            waiting.append((request, shards))
            downloads.begin(shards)
            while len(waiting) > 1 and (len(waiting) > AHEAD or downloads.full):
                yield downloads.awaited(*waiting.popleft())
        while waiting:
            yield downloads.awaited(*waiting.popleft())


class _Downloads:
    """The downloads of the shards that waiting requests need."""

    def __init__(self, rows: Rows, fetcher: Fetcher, sharing: int, ended: Callable[[], bool]) -> None:
        self._rows, self._fetcher, self._ended = rows, fetcher, ended
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(JOBS, "fetch")
        self._coming: dict[str, Future[None]] = {}
        self._seen: dict[str, float] = {}  # when a shard was there
        self._needed: Counter[str] = Counter()  # by how many of the waiting requests
        self._bytes, self._most = 0, quota() // (SHARE * sharing)

    def __enter__(self) -> _Downloads:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)  # a request that hangs would be waited for

    @property
    def full(self) -> bool:
        """Whether the shards of waiting requests take all the room that they may."""
        return self._bytes > self._most

    def begin(self, shards: set[str]) -> None:
        """Begins the downloads of a request's missing shards."""
        now = time.monotonic()
        for shard in sorted(shards):
            self._needed[shard] += 1
            self._bytes += self._fetcher.bytes_of(shard) if self._needed[shard] == 1 else 0
            if shard in self._coming or now - self._seen.get(shard, -FRESH) < FRESH:
                continue
            if self._fetcher.touch(shard):
                self._seen[shard] = now
            else:
                self._coming[shard] = self._pool.submit(self._fetch, shard)

    def awaited(self, request: BatchRequest, shards: set[str]) -> BatchRequest:
        """The request, once its shards are there. Raises what a download raised, and `Stopped`."""
        for shard in shards:
            self._needed[shard] -= 1
            if not self._needed[shard]:
                del self._needed[shard]
                self._bytes -= self._fetcher.bytes_of(shard)
            coming = self._coming.pop(shard, None)
            if coming is not None:
                while not wait([coming], LOOK).done:
                    if self._ended():
                        raise Stopped
                coming.result()
                self._seen[shard] = time.monotonic()
        return request

    def _fetch(self, shard: str) -> None:
        try:
            if self._fetcher.ensure(shard, stop=self._stop):
                self._rows.reader.close_removed()
        except Stopped:
            pass


def bytes_by_node(index: Index, plan: StepPlan, *, world: int, nodes: int, masked: bool, epoch: int = 0) -> list[int]:
    """Bytes of the shards that each node's ranks read in an epoch of training; `world` ranks, as many on each node.

    All views and texts of a sample count, though a showing draws one of each. The time is that of the plan: a million
    samples take a second or two.
    """
    needed = np.zeros((nodes, len(index.samples)), bool)
    per_node = world // nodes
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        for number, part in enumerate(plan.at(step)):
            ranks = ranks_of(number, part, plan, world)
            needed[ranks // per_node, index.samples_of(part.bucket, part.occurrences)] = True
    sizes = np.array([shard.bytes for shard in index.shards], np.int64)
    return [int(sizes[shards_with(index, mine, masked)].sum()) for mine in needed]


def bytes_by_part(index: Index, nodes: int, *, masked: bool) -> list[int]:
    """Bytes of the shards with the rows of each node's part of the buckets, by a partitioned shuffle."""
    sizes, totals = np.array([shard.bytes for shard in index.shards], np.int64), list[int]()
    for node in range(nodes):
        mine = np.zeros(len(index.samples), bool)
        for bucket, count in enumerate(index.counts):
            mine[index.samples_of(bucket, np.arange(count * node // nodes, count * (node + 1) // nodes))] = True
        totals.append(int(sizes[shards_with(index, mine, masked)].sum()))
    return totals


def shards_with(index: Index, samples: Column, masked: bool) -> Column:
    """The numbers of the shards that have rows of these samples, given as one bool for each; and the empty text's."""
    table = index.samples
    views = np.repeat(samples, np.diff(table.view_offsets))
    texts = np.repeat(samples, np.diff(table.text_offsets))
    references = np.repeat(samples, np.diff(table.reference_offsets))
    columns = [table.views["latent_shard"][views], table.texts["shard"][texts],
               table.references["latent_shard"][references],
               np.array([index.manifest.document["prompts"]["unconditional"]["shard"]])]
    if masked:
        masks = table.views["mask_shard"][views]
        columns.append(masks[masks >= 0])
    numbers: Column = np.unique(np.concatenate(columns))
    return numbers
