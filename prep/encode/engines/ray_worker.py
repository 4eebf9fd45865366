"""A worker of the Ray engine: a process on some node that holds an encoder and runs blocks of tasks, one at a time.

It reads pictures and writes shards and commits itself; what it answers are counts and findings. Nothing here imports
Ray: `ray.py` beside this makes an actor of it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from prep.cache.remote.opening import open_to_encode
from prep.cache.store import Cache, open_cache
from prep.encode.engines import local
from prep.encode.engines.job import Job, Outcome
from prep.encode.engines.tools import Tools
from prep.errors import CacheError, Problem
from prep.fs.lock import PATIENCE, lock_directory
from prep.progress import Tick, Total
from prep.workers.crew import Failure
from prep.workers.ray import check_version, failed, tried


class RayWorker:
    """The actor of the Ray engine. Two threads of Ray use it: one encodes, the other reports how far that is."""

    def __init__(self) -> None:
        self._rows = 0
        self._held = ExitStack()
        self._tools: Tools | None = None
        self._cache: Cache | None = None

    def start(self, job: Job, token: Path, wanted: str, directory: str) -> Failure | None:
        """Gets ready for blocks of `job`, if this node has its cache, where the command made the directory `token`.

        `wanted` is the command's version of Latentry, `directory` where it runs: paths may be relative to it. The cache
        stays locked as long as this process lives, so that nobody removes what it is writing, even if the command dies.
        """
        with suppress(OSError):  # a node that lacks it may still have all of the paths
            os.chdir(directory)
        try:
            self._cache = _cache_on_node(job.cache, token, wanted)
            self._held.enter_context(lock_directory(self._cache.root, exclusive=False, patience=PATIENCE))
        except Problem as problem:
            return failed(problem)
        self._tools = self._held.enter_context(Tools(job.jobs))
        return None

    def encode(self, job: Job) -> Outcome | Failure:
        """Encodes a block of tasks; returns when their commits are written."""
        self._rows = 0
        here = replace(job, cache=self._cache or job.cache)
        return tried(lambda: local.run(here, self._progress, self._tools))

    def beat(self) -> int:
        """Returns how many rows of the present block are done; an answer means that the process works."""
        return self._rows

    @contextmanager
    def _progress(self, _title: str, _total: Total, unit: str) -> Iterator[Tick]:
        yield self._count if unit else lambda _: None

    def _count(self, rows: int) -> None:
        self._rows += rows


def _cache_on_node(cache: Cache, token: Path, wanted: str) -> Cache:
    """The cache of a job on this node; of one in an object store, with copies of the node's own.

    Raises `UsageError` for another version, `CacheError` if this node has no cache at that path, or another one.
    """
    check_version(wanted)
    if cache.store is not None:
        return open_to_encode(cache.store, create=False)
    open_cache(cache.root, create=False)
    if not token.is_dir():
        raise CacheError(f"{cache.root} on node {platform.node()} is another directory than on the node of the command",
                         hint="keep the cache on a disk that all nodes share, under one path, or in an object store")
    return cache
