"""Workers of a crew that are actors of a Ray cluster: started, asked whether they still work, and ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prep.errors import UsageError, first_line
from prep.formatting import counted
from prep.workers.crew import Lost, Worker
from prep.workers.ray import Share

BEAT = 2.0  # seconds between two questions whether a worker still answers
SILENCE = 60.0  # seconds without an answer after which a worker is lost
START = 300.0  # seconds until the first worker must have started

U = TypeVar("U")


@dataclass(eq=False, slots=True)
class _Actor:
    handle: Any
    beat: Any = None  # reference of the answer of `beat`; None: not asked
    asked_at: float = 0.0  # when (monotonic seconds)


class Actors(Generic[U]):
    """As many actors as a share of a cluster has workers. Ray itself repeats nothing."""

    where = "of the Ray cluster"
    advice = "ray status and the logs of Ray say more"

    def __init__(self, ray: Any, share: Share, new: Callable[[], tuple[Any, Any]], call: Callable[[Any, U], Any], *,
                 ahead: int, at_once: int = 1) -> None:
        """`new` makes an actor and asks it to start: (actor, reference of the answer). `call` sends it a unit."""
        self._ray, self._share, self._new, self._call = ray, share, new, call
        self.workers, self.ahead, self.at_once = share.workers, ahead, at_once
        self._started = False  # whether any has

    def start(self) -> Worker[U]:
        """A new actor."""
        actor, starting = self._new()
        return Worker(handle=_Actor(actor), starting=starting)

    def send(self, worker: Worker[U], unit: U) -> Any:
        """The reference of what the actor answers."""
        return self._call(worker.handle.handle, unit)

    def wait(self, answers: Sequence[Any], seconds: float) -> Sequence[Any]:
        """The references whose answers have come."""
        ready, _ = self._ray.wait(list(answers), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(answers), num_returns=len(answers), timeout=0)
        return list(ready)

    def take(self, answer: Any) -> Any:
        """What an actor answers. Raises `Lost`."""
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            raise Lost(first_line(error)) from None

    def hear(self, worker: Worker[U], now: float) -> Any:
        """Asks an actor from time to time whether it still works; its answer, if one has come, else `None`.

        Raises `Lost`, and `UsageError` if none has started for long.
        """
        actor = worker.handle
        self._started |= worker.starting is None
        if worker.starting is not None:
            if not self._started and now - worker.since > START:
                raise UsageError(f"no worker started on the Ray cluster within {START:g} s; each needs "
                                 f"{counted(self._share.cpus, 'CPU')} and {self._share.gpus:g} GPUs",
                                 hint="ray status shows what is free; --workers and --num-gpus-per-worker ask for less")
        elif actor.beat is None:
            if now - actor.asked_at >= BEAT:
                actor.beat, actor.asked_at = actor.handle.beat.options(concurrency_group="beat").remote(), now
        elif self._ray.wait([actor.beat], timeout=0)[0]:
            answer, actor.beat = self.take(actor.beat), None
            return answer
        elif now - actor.asked_at > SILENCE:
            raise Lost(f"it did not answer for {SILENCE:g} s")
        return None

    def end(self, worker: Worker[U]) -> None:
        """Ends an actor, even if it is dead."""
        with suppress(Exception):  # or the whole cluster
            self._ray.kill(worker.handle.handle)
