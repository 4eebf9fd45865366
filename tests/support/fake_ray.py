"""As much of Ray as the engine uses, on a clock of its own, with workers in this process that do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class Never:
    """An answer that does not come."""


@dataclass(eq=False)
class Reference:
    actor: Any
    answer: Callable[[], Any]  # asked once, when the reference is first in its actor's queue
    due: float = 0.0  # by the clock
    value: Any = None
    there: bool = False


@dataclass(eq=False)
class Actor:
    """A worker; `encode` answers what `behave(number, job)` returns or raises."""

    ray: FakeRay
    number: int
    queue: list[Reference] = field(default_factory=list)
    dead: bool = False

    def __getattr__(self, name: str) -> Any:
        if name not in ("start", "encode", "beat"):
            raise AttributeError(name)
        call = SimpleNamespace(remote=lambda *values: self._asked(name, values))
        call.options = lambda **_: call
        return call

    def _asked(self, name: str, values: tuple[Any, ...]) -> Reference:
        if name == "beat":
            return Reference(self, lambda: self.ray.beats(self.number))
        answer = (lambda: self.ray.starts(self.number)) if name == "start" else (
            lambda: self.ray.behave(self.number, values[0]))
        self.queue.append(Reference(self, answer))
        return self.queue[-1]


@dataclass(eq=False)
class FakeRay:
    """`behave`, `starts` and `beats` get the number of a worker; they may return `Never`, or raise `RayError`."""

    behave: Callable[[int, Any], Any]
    starts: Callable[[int], Any] = lambda number: None
    beats: Callable[[int], Any] = lambda number: 0
    resources: list[dict[str, float]] = field(default_factory=lambda: [{"CPU": 1.0}, {"CPU": 1.0}])
    refuses: Exception | None = None  # what `init` raises
    now: float = 0.0
    actors: list[Actor] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # of the actors
    calls: list[Any] = field(default_factory=list)
    exceptions = SimpleNamespace(RayError=RayError)
    job_config = SimpleNamespace(JobConfig=SimpleNamespace)
    address = "127.0.0.1"  # of its nodes

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.calls.append(options)
        if self.refuses is not None:
            raise self.refuses

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": one, "NodeManagerAddress": self.address} for one in self.resources]

    def remote(self, **options: Any) -> Any:
        self.options = options

        def made() -> Actor:
            self.actors.append(Actor(self, len(self.actors)))
            return self.actors[-1]

        return lambda _: SimpleNamespace(remote=made)

    def wait(self, references: list[Reference], num_returns: int = 1,
             timeout: float = 0) -> tuple[list[Reference], list[Reference]]:
        for one in references:
            self._resolve(one)
        ready = [one for one in references if one.there][:num_returns]
        self.now += 0.001 if ready else timeout
        return ready, [one for one in references if one not in ready]

    def _resolve(self, one: Reference) -> None:
        queued = one in one.actor.queue
        if one.there or (queued and one.actor.queue[0] is not one):
            return
        if one.actor.dead:
            one.value, one.there = RayError("the actor is dead"), True
            return
        try:
            one.value = one.answer()
        except RayError as error:
            one.value, one.actor.dead = error, True
        if one.value is Never:
            one.answer = lambda: Never
            return
        one.there = True
        if queued:
            one.actor.queue.remove(one)

    def get(self, one: Reference) -> Any:
        if isinstance(one.value, RayError):
            raise one.value
        return one.value

    def kill(self, actor: Actor) -> None:
        actor.dead = True
        self.killed.append(actor.number)

    def monotonic(self) -> float:
        return self.now
