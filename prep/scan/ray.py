"""Examines pictures on a Ray cluster: an actor on each node, which asks worker processes of its own.

The command walks the sources, remembers results and reports, as without a cluster; only what `Examiner` says is done
elsewhere. Each thread of the scan sends a few items to an actor and waits for what was found. An actor that dies or
stops answering is replaced, and the items are sent again (Ray itself repeats nothing); after three attempts they become
findings, which are not remembered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Lock, Thread
from typing import Any, TypeVar

from prep.errors import CacheError
from prep.fs.blob import Blob
from prep.images.plugins import decoders
from prep.recipe.schema import Recipe
from prep.scan.examiner import Looked, not_examined
from prep.scan.protocol import PictureMessage
from prep.scan.ray_worker import ScanWorker
from prep.sources.item import Item
from prep.workers.actors import ATTEMPTS, PACE, Lost, Worker, Workers
from prep.workers.ray import ClusterOptions, Failure, Share, actors_of, connected, library
from prep.workers.service import Task

T = TypeVar("T")
MOST_CALLS = 256  # at a time, a thread of the command each; it remembers the results of as many processors at most


@contextmanager
def on_cluster(options: ClusterOptions, recipe: Recipe, note: Callable[[str], None]) -> Iterator[RayExaminer]:
    """An examiner on a cluster, for pictures of a recipe's sources. Raises `UsageError`."""
    ray = library(options.address)
    with connected(ray, options.address):
        examiner = RayExaminer(ray, Share.of(ray, options.workers, 0.0), lambda: _places(recipe))
        try:
            yield examiner
        finally:
            examiner.close()
            for line in examiner.notices:
                note(line)


def _places(recipe: Recipe) -> dict[str, int]:
    """The sources that are one directory or file here, and when each was last changed (ns)."""
    found = {}
    for path in (str(source.path) for source in recipe.sources):
        with suppress(OSError):
            found[path] = os.stat(path).st_mtime_ns  # noqa: PTH116  # as it was typed
    return found


class RayExaminer:
    """Sends items to actors. A thread of its own starts and replaces these, from the first call on."""

    def __init__(self, ray: Any, share: Share, places: Callable[[], dict[str, int]]) -> None:
        self._ray, self._share, self._places = ray, share, places
        self._ahead = share.cpus + 1  # calls that an actor has: one for each of its processes, and the next
        self.calls = min(MOST_CALLS, share.workers * self._ahead)
        self._class = actors_of(ray, ScanWorker, share, max_concurrency=self._ahead)
        # Each as often as it may be asked now. A `SimpleQueue` may wait forever in spite of a timeout (Python 3.11.7).
        self._free: Queue[Worker] = Queue()
        self._notices: dict[str, None] = {}
        self._workers = Workers(ray, share, self._new, self._notices.setdefault)
        self._broken: Exception | None = None  # why the scan cannot go on
        self._closed, self._lock = Event(), Lock()
        self._watching = Thread(target=self._watch, daemon=True)

    def examine(self, items: Sequence[Item]) -> list[Looked]:
        """As `Examiner.examine`. Raises what ends the scan: a `Problem` of the cluster, or of a worker."""
        try:
            found: list[Looked] = self._answer(lambda actor: actor.examine.remote(list(items)))
            return found
        except _GivenUp as why:
            return [not_examined(item, "decoder-crashed", f"was not examined: {why}") for item in items]

    def again(self, task: Task[PictureMessage, T], picture: Blob, file: str | None) -> T | None:
        """As `Examiner.again`. Raises as `examine` does."""
        try:
            found: T | None = self._answer(lambda actor: actor.again.remote(task.name, picture, file))
            return found
        except _GivenUp:
            return None

    def close(self) -> None:
        """Ends all workers; threads that wait for one give up."""
        self._closed.set()
        if self._watching.is_alive():
            self._watching.join()
        self._workers.close()
        self._workers.note_lost()

    @property
    def notices(self) -> list[str]:
        """What happened to workers, in lines, once it is closed."""
        return list(self._notices)

    def _answer(self, call: Callable[[Any], Any]) -> Any:
        """What a worker answers to a call. Raises `_GivenUp` after some attempts, and the `Problem` of a worker."""
        said = ""
        for _ in range(ATTEMPTS):
            worker = self._taken()
            try:
                answer = self._workers.answer(call(worker.actor))
            except Lost as lost:
                said = str(lost)
                self._lose(worker, said)
                continue
            self._workers.finished()
            self._free.put(worker)
            if not isinstance(answer, Failure):
                return answer
            raise answer.problem or RuntimeError(f"in a worker of the Ray cluster: {answer.said}")
        raise _GivenUp(f"its worker of the Ray cluster was lost {ATTEMPTS} times; the last time: {said}")

    def _taken(self) -> Worker:
        """A worker that may be asked now. Raises `_GivenUp` if the scan has ended, and what makes it end."""
        with self._lock:
            if self._watching.ident is None and not self._closed.is_set():
                self._watching.start()
        while not self._closed.is_set():
            if self._broken is not None:
                raise self._broken
            with suppress(Empty):
                worker = self._free.get(timeout=PACE)
                if not worker.lost:
                    return worker
        raise _GivenUp("the scan ended before")

    def _watch(self) -> None:
        """Starts workers, as many as there should be, and replaces those that are lost."""
        try:
            while not self._closed.is_set() and self._broken is None:
                self._workers.spawn(self._share.workers)
                for worker in list(self._workers.there):
                    self._look_at(worker, time.monotonic())
                self._closed.wait(PACE)
        except Exception as error:
            self._broken = error

    def _new(self) -> Worker:
        actor = self._class.remote()
        return Worker(actor=actor, starting=actor.start.remote(version("latentry"), decoders(), str(Path.cwd()),
                                                               self._places(), self._share.cpus))

    def _look_at(self, worker: Worker, now: float) -> None:
        """Lets a worker that has started be asked, and replaces one that does not answer."""
        try:
            if worker.starting is None or not self._workers.is_there(worker.starting):
                self._workers.hear(worker, now)
            elif self._workers.has_started(worker):
                for _ in range(self._ahead):
                    self._free.put(worker)
        except Lost as lost:
            self._lose(worker, str(lost))

    def _lose(self, worker: Worker, said: str) -> None:
        """Ends a worker that died or hangs; the threads that wait for it ask another."""
        with self._lock:
            if worker.lost or self._closed.is_set():
                return
            self._workers.lose(worker)
            try:
                self._workers.check_lost(said)
            except CacheError as error:
                self._broken = error


class _GivenUp(Exception):
    """Nobody answers: why."""
