"""Shares between the processes of a run which tasks are taken, how many rows failed, and whether to stop."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.context import BaseContext


class Claims:
    """Claims of a process that works alone: every task is free."""

    shared = False  # whether other processes take tasks, too

    def __init__(self) -> None:
        self._failed = 0
        self._stopped = False
        self._others: list[Claims] = []

    @property
    def stopped(self) -> bool:
        """Whether no other task is to be begun."""
        return self._stopped

    def stop(self) -> None:
        """Lets no further task be taken; those that were begun may be finished. Signal handlers may call this."""
        self._stopped = True
        for other in self._others:
            other.stop()

    def tell(self, other: Claims) -> None:
        """Stops `other` whenever this is stopped."""
        self._others.append(other)
        if self.stopped:
            other.stop()

    def take(self, task: str) -> bool:
        """Takes the task with this key; returns whether it was free."""
        return not self.stopped

    def failed(self) -> int:
        """Counts one more failed row; returns how many there are now, of all processes."""
        self._failed += 1
        return self._failed


class SharedClaims(Claims):
    """Claims of several processes, which get them as they start. A task that one took and did not finish waits for the
    next run."""

    shared = True

    def __init__(self, context: BaseContext, tasks: Sequence[str]) -> None:
        super().__init__()
        self._numbers = {task: number for number, task in enumerate(tasks)}
        self._lock = context.Lock()
        self._taken = context.RawArray("b", len(tasks))
        self._failures = context.RawValue("l", 0)
        self._stop = context.RawValue("b", 0)

    @property
    def stopped(self) -> bool:
        return bool(self._stop.value)

    def stop(self) -> None:
        self._stop.value = 1

    def take(self, task: str) -> bool:
        number = self._numbers[task]
        with self._lock:
            free = not self._taken[number] and not self.stopped
            self._taken[number] = 1
        return free

    def failed(self) -> int:
        with self._lock:
            self._failures.value += 1
            return int(self._failures.value)
