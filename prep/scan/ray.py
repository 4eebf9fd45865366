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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Lock, Thread
from typing import Any, TypeVar

from prep.errors import first_line
from prep.fs.blob import Blob
from prep.images.plugins import decoders
from prep.recipe.schema import Recipe
from prep.scan.examiner import Looked, not_examined
from prep.scan.protocol import PictureMessage
from prep.scan.ray_worker import ScanWorker
from prep.sources.item import Item
from prep.workers.ray import (
    ATTEMPTS,
    BEAT,
    MOST_LOST,
    PACE,
    SILENCE,
    START,
    ClusterOptions,
    Failure,
    Share,
    actors_of,
    asked_to_beat,
    connected,
    library,
    lost_note,
    none_started,
    too_many_lost,
    unused_note,
)
from prep.workers.service import Task

T = TypeVar("T")
MOST_CALLS = 256  # at a time, a thread of the command each; it remembers the results of as many processors at most


@contextmanager
def on_cluster(options: ClusterOptions, recipe: Recipe, note: Callable[[str], None]) -> Iterator[RayExaminer]:
    """An examiner on a cluster, for pictures of a recipe's sources. Raises `UsageError`."""
    ray = library()
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


@dataclass(eq=False, slots=True)
class _Worker:
    """An actor, from the command's side."""

    actor: Any
    starting: Any  # reference of the answer of `start`; None: it has started
    since: float  # when it was asked to start
    beat: Any = None  # reference of the answer of `beat`; None: not asked
    asked: float = 0.0
    lost: bool = False


class RayExaminer:
    """Sends items to actors. A thread of its own starts and replaces these, from the first call on."""

    def __init__(self, ray: Any, share: Share, places: Callable[[], dict[str, int]]) -> None:
        self._ray, self._share, self._places = ray, share, places
        self._ahead = share.cpus + 1  # calls that an actor has: one for each of its processes, and the next
        self.calls = min(MOST_CALLS, share.workers * self._ahead)
        self._class = actors_of(ray, ScanWorker, share, max_concurrency=self._ahead)
        # Each as often as it may be asked now. A `SimpleQueue` may wait forever in spite of a timeout (Python 3.11.7).
        self._free: Queue[_Worker] = Queue()
        self._workers: list[_Worker] = []
        self._size = share.workers  # how many there should be
        self._started = False  # whether any has
        self._lost = self._lost_in_row = 0
        self._unused: list[str] = []
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
        for worker in list(self._workers):
            self._kill(worker)

    @property
    def notices(self) -> list[str]:
        """What happened to workers, in lines."""
        return [*dict.fromkeys(self._unused), *([lost_note(self._lost)] if self._lost else [])]

    def _answer(self, call: Callable[[Any], Any]) -> Any:
        """What a worker answers to a call. Raises `_GivenUp` after some attempts, and the `Problem` of a worker."""
        said = ""
        for _ in range(ATTEMPTS):
            worker = self._taken()
            try:
                answer = self._ray.get(call(worker.actor))
            except self._ray.exceptions.RayError as error:
                said = first_line(error)
                self._lose(worker, said)
                continue
            self._lost_in_row = 0
            self._free.put(worker)
            if not isinstance(answer, Failure):
                return answer
            raise answer.problem or RuntimeError(f"in a worker of the Ray cluster: {answer.said}")
        raise _GivenUp(f"its worker of the Ray cluster was lost {ATTEMPTS} times; the last time: {said}")

    def _taken(self) -> _Worker:
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
                self._spawn()
                for worker in list(self._workers):
                    self._look_at(worker, time.monotonic())
                self._closed.wait(PACE)
        except Exception as error:
            self._broken = error

    def _spawn(self) -> None:
        while len(self._workers) < self._size:
            actor = self._class.remote()
            starting = actor.start.remote(version("latentry"), decoders(), str(Path.cwd()), self._places(),
                                          self._share.cpus)
            with self._lock:
                self._workers.append(_Worker(actor=actor, starting=starting, since=time.monotonic()))

    def _look_at(self, worker: _Worker, now: float) -> None:
        """Lets a worker that has started be asked, and replaces one that does not answer."""
        try:
            if worker.starting is not None:
                if self._is_there(worker.starting):
                    self._has_started(worker, self._ray.get(worker.starting))
                elif not self._started and now - worker.since > START:
                    raise none_started(self._share)
            elif worker.beat is None:
                if now - worker.asked >= BEAT:
                    worker.beat, worker.asked = asked_to_beat(worker.actor), now
            elif self._is_there(worker.beat):
                self._ray.get(worker.beat)
                worker.beat = None
            elif now - worker.asked > SILENCE:
                self._lose(worker, f"it did not answer for {SILENCE:g} s")
        except self._ray.exceptions.RayError as error:
            self._lose(worker, first_line(error))

    def _is_there(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    def _has_started(self, worker: _Worker, answer: Failure | None) -> None:
        """Takes the answer of a new worker; one that does not fit its node is not replaced."""
        if answer is None:
            worker.starting, self._started = None, True
            for _ in range(self._ahead):
                self._free.put(worker)
            return
        self._kill(worker)
        self._size -= 1
        if not self._size and answer.problem is not None:
            raise answer.problem
        self._unused.append(unused_note(answer.said))

    def _lose(self, worker: _Worker, said: str) -> None:
        """Ends a worker that died or hangs; the threads that wait for it ask another."""
        with self._lock:
            if worker.lost or self._closed.is_set():
                return
            worker.lost = True
            self._lost += 1
            self._lost_in_row += 1
            if self._lost_in_row > MOST_LOST + self._share.workers:
                self._broken = too_many_lost(self._lost_in_row, said)
        self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        with self._lock, suppress(ValueError):
            self._workers.remove(worker)
        with suppress(Exception):  # it may be dead, or the whole cluster
            self._ray.kill(worker.actor)


class _GivenUp(Exception):
    """Nobody answers: why."""
