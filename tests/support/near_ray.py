"""As much of Ray as a scan uses, in this process: actors are objects that threads call, and that die as they are told.

`behave(number, name)` is called before a worker answers `name`; it may raise `RayError`, after which the worker is
dead, return `Never`, or another answer than `None` in place of the worker's own. Questions and answers travel as bytes.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any

from fake_ray import Never, RayError


@dataclass(eq=False)
class Reference:
    actor: Actor
    name: str
    values: tuple[Any, ...]
    answer: Any = Never


@dataclass(eq=False)
class Actor:
    ray: NearRay
    number: int
    worker: Any
    dead: Event = field(default_factory=Event)

    def __getattr__(self, name: str) -> Any:
        call = SimpleNamespace(remote=lambda *values: Reference(self, name, values))
        call.options = lambda **_: call
        return call


@dataclass(eq=False)
class NearRay:
    behave: Callable[[int, str], Any] = lambda number, name: None
    resources: list[dict[str, float]] = field(default_factory=lambda: [{"CPU": 1.0}, {"CPU": 1.0}])
    actors: list[Actor] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    exceptions = SimpleNamespace(RayError=RayError)
    travelled: list[bytes] = field(default_factory=list)

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": one} for one in self.resources]

    def remote(self, **options: Any) -> Any:
        self.options = options

        def of(kind: type) -> Any:
            def made() -> Actor:
                self.actors.append(Actor(self, len(self.actors), kind()))
                return self.actors[-1]

            return SimpleNamespace(remote=made)

        return of

    def wait(self, references: list[Reference], num_returns: int = 1,
             timeout: float = 0) -> tuple[list[Reference], list[Reference]]:
        for one in references:
            self._answer(one)
        ready = [one for one in references if one.answer is not Never][:num_returns]
        if not ready:
            time.sleep(timeout)
        return ready, [one for one in references if one not in ready]

    def get(self, one: Reference) -> Any:
        if isinstance(one.answer, RayError):
            raise one.answer
        return self._sent(one.answer)

    def _answer(self, one: Reference) -> None:
        if one.answer is not Never:
            return
        if one.actor.dead.is_set():
            one.answer = RayError("The actor died.\nIts node is gone.")
            return
        try:
            answer = self.behave(one.actor.number, one.name)
            if answer is None:
                answer = getattr(one.actor.worker, one.name)(*self._sent(one.values))
            one.answer = answer
        except RayError as error:
            one.answer = error
            one.actor.dead.set()

    def _sent(self, value: Any) -> Any:
        self.travelled.append(pickle.dumps(value))
        return pickle.loads(self.travelled[-1])

    def kill(self, actor: Actor) -> None:
        actor.dead.set()
