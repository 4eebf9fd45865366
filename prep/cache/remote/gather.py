"""Brings rows of a cache in a store here to copy them into other shards: `prep compact` works on them as on a disk's.

Every shard is fetched once as a whole, because only its digest shows that its rows are its own; copies stay as far as
there is room. Of those that had to go again, just the rows that are wanted are asked for, by ranges: whoever copies
rows by key wants a run of each shard's rows, and not once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from prep.arrays import ArraySpec
from prep.cache import shard_format
from prep.cache.remote.headers import as_stored
from prep.cache.remote.quota import QUOTA
from prep.cache.remote.shards import TRIES, Fetcher, Spoiled, incomplete, url_in
from prep.cache.remote.working import ensure_rows, shard_of, write_hollow
from prep.cache.shard_check import verify_shard
from prep.cache.store import Cache
from prep.fs import atomic
from prep.fs.remote.objects import stream
from prep.fs.remote.retry import side_by_side
from prep.progress import Tick

JOBS = 8  # shards fetched at a time
NEAR = 4096  # bytes between two rows that are fetched along with them: less than another request costs
PIECE = 1 << 20  # bytes
Rows = np.ndarray[Any, Any]  # int64 [N]: numbers of rows


def misplaced(cache: Cache, digests: Sequence[str], tick: Tick) -> frozenset[str]:
    """The shards in the store of a working copy with damage that no checksum locates: rows that may be another's.

    Fetches each that has no copy here. Calls `tick(1)` for each. Raises `CacheError`, also for a shard that is gone.
    """
    copy, stop = ensure_rows(cache, digests), threading.Event()
    fetcher = Fetcher(copy)

    def is_misplaced(digest: str) -> bool:
        try:
            fetcher.ensure(digest, stop=stop)
            return False
        except Spoiled:
            with as_stored(copy, digest, rows=True, stop=stop) as stored:
                return any(one.array is None for one in verify_shard(stored, digest))
        finally:
            tick(1)

    found = side_by_side(is_misplaced, digests, JOBS, stop)
    return frozenset(digest for digest, bad in zip(digests, found, strict=True) if bad)


@contextmanager
def fetch_rows(cache: Cache, rows: Mapping[str, Rows]) -> Iterator[Cache]:
    """A cache with these rows, sorted, of these shards, for the time of the block: `cache` itself unless it is a
    working copy.

    Rows that are damaged in the store stay damaged. Takes the room of the rows on the disk, which counts as room of
    copies. Raises `CacheError`.
    """
    if cache.store is None:
        yield cache
        return
    scratch, stop = Cache(root=cache.stage()), threading.Event()
    try:
        shards = {digest: shard_of(cache, digest) for digest in rows}
        QUOTA.make(sum(len(rows[digest]) * shard_format.row_stride(spec)
                      for digest, shard in shards.items() for spec in shard.arrays))
        copy = ensure_rows(cache, list(rows))

        def gather(digest: str) -> None:
            write_hollow(scratch, shards[digest], (cache.shard(digest) / shard_format.KEY_PATH).read_bytes())
            for spec in shards[digest].arrays:
                for first, past in _runs(rows[digest], shard_format.row_stride(spec)):
                    _fill(scratch, copy, digest, spec, first, past, stop)

        side_by_side(gather, list(rows), JOBS, stop)
        yield scratch
    finally:
        atomic.remove_tree(scratch.root)


def _runs(rows: Rows, stride: int) -> Iterator[tuple[int, int]]:
    """The first row and the end of each run of rows without large gaps."""
    cuts = np.flatnonzero((np.diff(rows) - 1) * stride > NEAR) + 1
    for run in np.split(rows, cuts):
        yield int(run[0]), int(run[-1]) + 1


def _fill(scratch: Cache, copy: Cache, digest: str, spec: ArraySpec, first: int, past: int,
          stop: threading.Event) -> None:
    """Writes rows of an array to a shard that has holes for them: those of the copy, or of the store."""
    stride, name = shard_format.row_stride(spec), shard_format.data_path(spec)
    start, end, path = first * stride, past * stride, scratch.shard(digest) / name
    with suppress(FileNotFoundError):
        if _written(path, _pieces(copy.shard(digest) / name, start, end), start, end, spec):
            return
    url = url_in(copy, digest, name)
    for _ in range(TRIES):
        try:
            if _written(path, stream(url, end, start=start, stop=stop), start, end, spec):
                return
        except OSError as error:
            if error.filename != url:
                raise
            if isinstance(error, FileNotFoundError):
                raise incomplete(copy, digest, name) from None
            # It ends before these rows: they are damaged, and stay so.


def _pieces(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as handle:
        handle.seek(start)
        while start < end and (piece := handle.read(min(PIECE, end - start))):
            start += len(piece)
            yield piece


def _written(path: Path, pieces: Iterator[Any], start: int, end: int, spec: ArraySpec) -> bool:
    """Writes rows from byte `start` to `end` of a file; returns whether all match their checksums."""
    stride = shard_format.row_stride(spec)
    with path.open("r+b") as handle:
        handle.seek(start)
        for piece in pieces:
            atomic.write(handle, piece)
        handle.seek(start)
        rows = (handle.read(stride) for _ in range(start, end, stride))
        return all(shard_format.crc_bytes(row[: spec.row_bytes]) == row[spec.row_bytes :] for row in rows)
