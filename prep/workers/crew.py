"""A crew: workers, wherever they run, that are handed units of work; a worker that is lost is replaced.

A plan is addressed by content, so it does not matter which worker does a unit, nor how often one is begun. A unit whose
worker was lost is handed out again, and given up after three attempts. One thread drives a crew: workers are started,
fed, heard and replaced while it calls `step`, or iterates over `as_completed` or `in_order`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from prep.errors import CacheError, Problem
from prep.formatting import counted

ATTEMPTS = 3  # of a unit
PACE = 0.2  # seconds between two looks at the workers, at most
MOST_LOST = 5  # workers in a row that may be lost before any has finished a unit; besides one for each

U = TypeVar("U")
R = TypeVar("R")


class Lost(Exception):
    """A worker died or hangs: what is known of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a worker could not start, or could not do a unit: its answer then."""

    problem: Problem | None  # None: an error that may not come again
    said: str  # in a line


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The result of a unit that failed `ATTEMPTS` times: how, the last time."""

    said: str


@dataclass(eq=False, slots=True)
class Order(Generic[U]):
    """A unit that is waiting or under way."""

    unit: U
    attempts: int = 0  # that failed
    answer: Any = None  # what the host knows its answer by, once it is sent


@dataclass(eq=False, kw_only=True, slots=True)
class Worker(Generic[U]):
    """A worker, with the units that it was sent."""

    handle: Any  # what the host knows it by
    starting: Any = None  # as `Order.answer`, of the request to start; None: it has started
    since: float = 0.0  # when it began its first unit, or was asked to start (monotonic seconds)
    orders: deque[Order[U]] = field(default_factory=deque)


class Host(Protocol[U]):
    """Where workers run: how they are started, asked, heard and ended."""

    workers: int  # how many there should be
    ahead: int  # units that a worker has: those under way, and the next
    at_once: int  # units that a worker has under way at a time
    where: str  # "of the Ray cluster", for messages
    advice: str  # where to look if workers are lost

    def start(self) -> Worker[U]:
        """A new worker, which may not have started yet."""

    def send(self, worker: Worker[U], unit: U) -> Any:
        """Hands a unit to a worker; what its answer is known by."""

    def wait(self, answers: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Those of the answers that have come; waits up to `seconds` for the first."""

    def take(self, answer: Any) -> Any:
        """An answer that has come: a result, or a `Failure`; `None` of a start. Raises `Lost`."""

    def hear(self, worker: Worker[U], now: float) -> Any:
        """How far the worker's first unit is; `None` if that is not known. Raises `Lost`, and a `Problem` if no worker
        will start."""

    def end(self, worker: Worker[U]) -> None:
        """Ends a worker, whatever it is doing."""


def _never_split(unit: U) -> Sequence[U]:
    return [unit]


class Crew(Generic[U, R]):
    """Workers of a host. As a context manager, ends them."""

    def __init__(self, host: Host[U], *, note: Callable[[str], object] = lambda _: None,
                 split: Callable[[U], Sequence[U]] = _never_split, limit: Callable[[U], float] = lambda _: math.inf,
                 show: Callable[[U, Any], object] = lambda _, __: None, repeat: bool = False,
                 stopped: Callable[[], bool] = lambda: False) -> None:
        """`note` gets lines for the user; `show`, how far a unit is.

        `split`: the units that one is handed out as after it failed. `limit`: seconds that one may take. `repeat`:
        whether one that failed for another reason than a `Problem` is handed out again; else that ends the work. After
        `stopped`, no unit is begun, and those under way are finished.
        """
        self._host, self._note, self._show = host, note, show
        self._split, self._limit, self._repeat, self._stopped = split, limit, repeat, stopped
        self._size = host.workers  # without those that do not fit their nodes
        self._waiting: deque[Order[U]] = deque()
        self._workers: list[Worker[U]] = []
        self._completed: list[tuple[U, R | GivenUp]] = []
        self._lost = self._lost_in_row = 0

    @property
    def at_once(self) -> int:
        """How many units the workers have under way at a time."""
        return self._host.workers * self._host.at_once

    @property
    def pending(self) -> int:
        """How many units were added and have no result yet."""
        return len(self._waiting) + sum(len(worker.orders) for worker in self._workers)

    @property
    def full(self) -> bool:
        """Whether enough units are pending to keep all workers busy."""
        return self.pending >= 2 * max(self.at_once, self._host.workers * self._host.ahead)

    def add(self, unit: U) -> None:
        """Adds a unit to those that are handed out."""
        self._waiting.append(Order(unit))

    def step(self, seconds: float | None = None) -> list[tuple[U, R | GivenUp]]:
        """Starts workers, hands out units, waits up to `seconds` (default: `PACE`) for an answer, and looks after the
        workers; the units that were completed, with their results.

        Raises `CacheError` if workers are lost again and again, and whatever ends the work of one.
        """
        if self._stopped():
            self._waiting.clear()
        while len(self._workers) < min(self._size, self.pending):
            worker = self._host.start()
            worker.since = time.monotonic()
            self._workers.append(worker)
        self._feed()
        self._collect(PACE if seconds is None else seconds)
        self._watch()
        completed, self._completed = self._completed, []
        return completed

    def as_completed(self, units: Iterable[U]) -> Iterator[tuple[U, R | GivenUp]]:
        """Each unit with its result, as they come; without those that were not begun before a stop."""
        for unit in units:
            self.add(unit)
            while self.full:
                yield from self.step()
            if self._stopped():
                break
        while self.pending:
            yield from self.step()

    def in_order(self, units: Iterable[U]) -> Iterator[R | GivenUp]:
        """The results of units, in the order of the units; of a crew that neither splits nor is stopped."""
        results: dict[int, R | GivenUp] = {}
        ordered = list(units)
        places: dict[int, deque[int]] = defaultdict(deque)  # several, if units are one object
        for number, unit in enumerate(ordered):
            places[id(unit)].append(number)
        yielded = 0
        for unit, result in self.as_completed(ordered):
            results[places[id(unit)].popleft()] = result
            while yielded in results:
                yield results.pop(yielded)
                yielded += 1

    def close(self) -> None:
        """Ends all workers, and notes how many were lost, if any."""
        for worker in list(self._workers):
            self._end(worker)
        if self._lost:
            self._note(f"note: {counted(self._lost, 'worker')} {self._host.where} lost and replaced")

    def __enter__(self) -> Crew[U, R]:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        self.close()

    def _feed(self) -> None:
        """Hands out units: first to workers that have none."""
        for depth in range(self._host.ahead):
            for worker in self._workers:
                if worker.starting is None and len(worker.orders) == depth and self._waiting:
                    order = self._waiting.popleft()
                    if not worker.orders:
                        worker.since = time.monotonic()
                    order.answer = self._host.send(worker, order.unit)
                    worker.orders.append(order)

    def _collect(self, seconds: float) -> None:
        """Waits for answers, and takes all there are."""
        expected: dict[Any, tuple[Worker[U], Order[U] | None]] = {}
        for worker in self._workers:
            if worker.starting is not None:
                expected[worker.starting] = worker, None
            for order in list(worker.orders)[:self._host.at_once]:
                expected[order.answer] = worker, order
        for answer in self._host.wait(list(expected), seconds) if expected else ():
            worker, begun = expected[answer]
            if worker not in self._workers:  # lost by an answer before this
                continue
            try:
                if begun is None:
                    self._has_started(worker, self._host.take(answer))
                else:
                    self._has_answered(worker, begun, self._host.take(answer))
            except Lost as lost:
                self._lose(worker, str(lost))

    def _has_started(self, worker: Worker[U], answer: Failure | None) -> None:
        """Lets a worker be fed; one that does not fit its node is not replaced. Raises what was wrong with the last."""
        worker.starting = None
        if answer is None:
            return
        self._end(worker)
        self._size -= 1
        if not self._size and answer.problem is not None:
            raise answer.problem
        self._note(f"note: a worker {self._host.where} was not used: {answer.said}")

    def _has_answered(self, worker: Worker[U], order: Order[U], answer: R | Failure) -> None:
        worker.orders.remove(order)
        worker.since = time.monotonic()
        if self._stopped():
            worker.orders.clear()  # before it begins the next
            self._end(worker)
        if not isinstance(answer, Failure):
            self._lost_in_row = 0
            self._completed.append((order.unit, answer))
        elif answer.problem is not None:
            raise answer.problem
        elif self._repeat:
            self._again(order, answer.said)
        else:
            raise RuntimeError(f"in a worker {self._host.where}: {answer.said}")

    def _again(self, order: Order[U], said: str) -> None:
        """Has a unit done again, before those that wait; gives it up after the last attempt."""
        attempts = order.attempts + 1
        if attempts < ATTEMPTS:
            self._waiting.extendleft(Order(unit, attempts) for unit in reversed(self._split(order.unit)))
            return
        if self._host.at_once == 1:  # else it may not be the one to blame
            self._lost_in_row = 0
        self._completed.append((order.unit, GivenUp(said)))

    def _lose(self, worker: Worker[U], said: str) -> None:
        """Ends a worker that died or hangs, and gives its units to others. Raises `CacheError` if too many are lost."""
        self._end(worker)
        self._lost += 1
        self._lost_in_row += 1
        orders = list(worker.orders)
        self._waiting.extendleft(reversed(orders[self._host.at_once:]))  # it had not begun these
        for order in reversed(orders[:self._host.at_once]):
            self._again(order, said)
        if self._lost_in_row > MOST_LOST + self._host.workers:
            raise CacheError(f"{self._lost_in_row} workers {self._host.where} were lost in a row, and none finished a "
                             f"task; the last: {said}", hint=f"{self._host.advice}; finished work is kept: run the "
                             "same command again")

    def _watch(self) -> None:
        """Replaces workers that hang, and shows how far the others are."""
        now = time.monotonic()
        for worker in list(self._workers):
            limit = self._limit(worker.orders[0].unit) if worker.orders else math.inf
            try:
                if now - worker.since > limit:
                    raise Lost(f"it took more than {limit:g} s (--task-seconds)")
                heard = self._host.hear(worker, now)
            except Lost as lost:
                self._lose(worker, str(lost))
                continue
            if worker.orders and heard is not None:
                self._show(worker.orders[0].unit, heard)

    def _end(self, worker: Worker[U]) -> None:
        self._workers.remove(worker)
        self._host.end(worker)
