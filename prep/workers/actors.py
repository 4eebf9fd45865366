"""The workers of a command on a Ray cluster, as the command sees them: started, asked whether they work, replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prep.errors import CacheError, UsageError, first_line
from prep.formatting import counted
from prep.workers.ray import Failure, Share

ATTEMPTS = 3  # of a task
PACE = 0.2  # seconds between two looks at the workers, at most
BEAT = 2.0  # seconds between two questions whether a worker still answers
SILENCE = 60.0  # seconds without an answer after which a worker is replaced
START = 300.0  # seconds until the first worker must have started
MOST_LOST = 5  # workers in a row that may be lost before any has finished a task; besides one for each


class Lost(Exception):
    """A worker died or hangs: what is known of it."""


@dataclass(eq=False, kw_only=True, slots=True)
class Worker:
    """An actor."""

    actor: Any
    starting: Any  # reference of the answer of `start`; None: it has started
    since: float = 0.0  # when it was asked to start
    beat: Any = None  # reference of the answer of `beat`; None: not asked
    asked: float = 0.0
    lost: bool = False


W = TypeVar("W", bound=Worker)


class Workers(Generic[W]):
    """As many workers as a cluster has shares, but for those that do not fit their nodes."""

    def __init__(self, ray: Any, share: Share, new: Callable[[], W], note: Callable[[str], None]) -> None:
        """`new` makes an actor and asks it to start; `note` gets lines for the user."""
        self._ray, self._share, self._new, self._note = ray, share, new, note
        self._size = share.workers  # how many there should be
        self._started = False  # whether any has
        self._lost = self._lost_in_row = 0
        self.there: list[W] = []

    def spawn(self, most: int) -> None:
        """Starts those that are missing, up to `most`."""
        while len(self.there) < min(self._size, most):
            worker = self._new()
            worker.since = time.monotonic()
            self.there.append(worker)

    def has_started(self, worker: W) -> bool:
        """Takes the answer of a new worker; one that does not fit its node is not replaced. Raises `Lost`, and what
        was wrong with the last one."""
        answer: Failure | None = self.answer(worker.starting)
        if answer is None:
            worker.starting, self._started = None, True
            return True
        self.end(worker)
        self._size -= 1
        if not self._size and answer.problem is not None:
            raise answer.problem
        self._note(f"note: a worker of the Ray cluster was not used: {answer.said}")
        return False

    def is_there(self, reference: Any) -> bool:
        """Whether an answer has come."""
        return bool(self._ray.wait([reference], timeout=0)[0])

    def answer(self, reference: Any) -> Any:
        """What a worker answers. Raises `Lost`."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise Lost(first_line(error)) from None

    def hear(self, worker: W, now: float) -> Any:
        """Asks a worker from time to time whether it still works; its answer, if one has come, else `None`.

        Raises `Lost`, and `UsageError` if none has started for long.
        """
        if worker.starting is not None:
            if not self._started and now - worker.since > START:
                raise UsageError(f"no worker started on the Ray cluster within {START:g} s; each needs "
                                 f"{counted(self._share.cpus, 'CPU')} and {self._share.gpus:g} GPUs",
                                 hint="ray status shows what is free; --workers and --num-gpus-per-worker ask for less")
        elif worker.beat is None:
            if now - worker.asked >= BEAT:
                worker.beat, worker.asked = worker.actor.beat.options(concurrency_group="beat").remote(), now
        elif self.is_there(worker.beat):
            answer, worker.beat = self.answer(worker.beat), None
            return answer
        elif now - worker.asked > SILENCE:
            raise Lost(f"it did not answer for {SILENCE:g} s")
        return None

    def finished(self) -> None:
        """A task is done, or given up: those that are lost from now on are another row."""
        self._lost_in_row = 0

    def lose(self, worker: W) -> None:
        """Ends a worker that is lost; `spawn` replaces it."""
        worker.lost = True
        self._lost += 1
        self._lost_in_row += 1
        self.end(worker)

    def check_lost(self, said: str) -> None:
        """Raises `CacheError` if too many were lost in a row; `said` is of the last one."""
        if self._lost_in_row > MOST_LOST + self._share.workers:
            raise CacheError(f"{self._lost_in_row} workers of the Ray cluster were lost in a row, and none finished a "
                             f"task; the last: {said}", hint="ray status and the logs of Ray say more; finished work "
                             "is kept: run the same command again")

    def end(self, worker: W) -> None:
        """Ends a worker."""
        with suppress(ValueError):
            self.there.remove(worker)
        with suppress(Exception):  # it may be dead, or the whole cluster
            self._ray.kill(worker.actor)

    def close(self) -> None:
        """Ends all."""
        for worker in list(self.there):
            self.end(worker)

    def note_lost(self) -> None:
        """Says how many were lost, if any."""
        if self._lost:
            self._note(f"note: {counted(self._lost, 'worker')} of the Ray cluster lost and replaced")
