"""Writes shards and commits in a thread of their own: the device never waits for a digest or the disk.

One thread does all of it, task after task, so that the disk changes in the same order as without it. Rows wait in
memory, up to `MOST_BYTES`; then the encoder waits, too. An error of the thread ends the run: it is raised by the next
row, or at the end. A task whose rows end early leaves nothing; tasks before it are completed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Generic, TypeVar

from prep.fs.remote.errors import Stopped

Row = TypeVar("Row")

MOST_BYTES = 64 << 20  # of rows that wait


class Abandoned(Exception):
    """The rows of a task ended early, since the run ends."""


class WritingThread(Generic[Row]):
    """Passes rows to a thread. As a context manager, waits for it; raises its error unless there is one already."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._tasks: list[Future[None]] = []  # that may not have ended
        self._changed = threading.Condition()
        self._rows: deque[tuple[Row | None, int]] = deque()  # of all tasks, in order; None ends a task
        self._bytes, self._most = 0, most_bytes
        self._error: BaseException | None = None
        self.abandoned = threading.Event()  # set when the run ends early: uploads stop, too

    def write(self, consume: Callable[[Iterator[Row]], None], rows: Iterable[Row]) -> None:
        """Has the thread call `consume` with the rows of a task; returns when the last row is made."""
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(self._pool.submit(self._consumed, consume))
        for row in rows:
            self._put(row, size_of(row))
        self._put(None, 0)

    def __enter__(self) -> WritingThread[Row]:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        try:
            if kind is not None:
                self._abandon()
            wait(self._tasks)
        except BaseException:  # the run has to stop at once, while it waits for what is left to be written
            self._abandon()
            wait(self._tasks)
            raise
        finally:
            self._pool.shutdown()  # after the wait: Python 3.11 takes a thread whose join was interrupted as ended
        if kind is None and self._error is not None:
            raise self._error

    def _abandon(self) -> None:
        with self._changed:
            self.abandoned.set()
            self._changed.notify_all()

    def _put(self, row: Row | None, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._bytes or self._bytes + size <= self._most)
            if self._error is not None:
                raise self._error
            self._rows.append((row, size))
            self._bytes += size
            self._changed.notify_all()

    def _consumed(self, consume: Callable[[Iterator[Row]], None]) -> None:
        """One task, in the thread; nothing more is written after an error."""
        if self._error is not None:
            return
        try:
            consume(self._taken())
        except (Abandoned, Stopped):
            return
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _taken(self) -> Iterator[Row]:
        """The rows of the next task. Raises `Abandoned` if the run ends before its last row is made."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self.abandoned.is_set())
                if not self._rows:
                    raise Abandoned
                row, size = self._rows.popleft()
                self._bytes -= size
                self._changed.notify_all()
            if row is None:
                return
            yield row


def size_of(row: Any) -> int:
    """The bytes of a (key, arrays) pair; those of other rows do not count."""
    made = row[1] if isinstance(row, tuple) else None
    return sum(array.nbytes for array in made.values()) if isinstance(made, Mapping) else 0
