"""Workers of a crew on this computer: processes that do one unit each, or threads of this process."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Generic, TypeVar

from prep.progress import Progress, Tick, Total
from prep.runtime import safe_path, stops_held
from prep.workers.crew import Worker

PACE = 0.2  # seconds between two messages of a progress bar
U = TypeVar("U")
R = TypeVar("R")


class Threads(Generic[U]):
    """Threads of this process, together one worker that is never lost."""

    workers = 1
    where, advice = "of this computer", ""

    def __init__(self, work: Callable[[U], Any], number: int, close: Callable[[], object]) -> None:
        """`work` does a unit, in one of `number` threads; `close` has those under way end early."""
        self._work, self._close, self._pool = work, close, futures.ThreadPoolExecutor(number)
        self.at_once, self.ahead = number, 2 * number

    def start(self) -> Worker[U]:
        """The threads; each starts with its first unit."""
        return Worker(handle=self._pool)

    def send(self, _worker: Worker[U], unit: U) -> futures.Future[Any]:
        """The future of the unit's result."""
        return self._pool.submit(self._work, unit)

    def wait(self, answers: Sequence[futures.Future[Any]], seconds: float) -> Sequence[futures.Future[Any]]:
        """The futures that are done."""
        done = futures.wait(answers, seconds, futures.FIRST_COMPLETED).done
        return [answer for answer in answers if answer in done]

    def take(self, answer: futures.Future[Any]) -> Any:
        """The result of a unit. Raises what it raised."""
        return answer.result()

    def hear(self, _worker: Worker[U], _now: float) -> None:
        """Nothing: their progress is not shown."""

    def end(self, _worker: Worker[U]) -> None:
        """Ends what is under way, and waits for that."""
        self._close()  # first: threads may wait for it
        self._pool.shutdown(cancel_futures=True)


class Processes(Generic[U]):
    """Processes, each with a unit of its own; if one fails or ends early, so does all the work."""

    ahead = at_once = 1
    where, advice = "of this computer", ""

    def __init__(self, context: SpawnContext, work: Callable[[U, Progress], Any], workers: int,
                 lost: Callable[[U, int], Exception], report: Callable[..., object]) -> None:
        """`work` is sent to the processes, and does a unit there. `report` gets what it shows of its progress: "stage",
        title, total and unit; "phase" or "end", and title; "tick", title and count. `lost` gets a unit and the exit
        code of its process, which ended without an answer.
        """
        self._context, self._work, self.workers, self._lost, self._report = context, work, workers, lost, report

    def start(self) -> Worker[U]:
        """A new process, which waits for its unit."""
        with _interrupts_ignored(), stops_held(), safe_path():
            return Worker(handle=_Process(self._context, self._work))

    def send(self, worker: Worker[U], unit: U) -> _Process:
        """The process, which now has a unit."""
        process: _Process = worker.handle
        process.unit = unit
        with suppress(BrokenPipeError):  # it has ended: its answer says so
            process.pipe.send(unit)
        return process

    def wait(self, answers: Sequence[_Process], seconds: float) -> Sequence[_Process]:
        """The processes that have answered or ended; passes on what others report."""
        by_pipe = {process.pipe: process for process in answers}
        ready = wait(list(by_pipe), seconds)
        return [process for pipe, process in by_pipe.items() if pipe in ready and process.has_answered(self._report)]

    def take(self, answer: _Process) -> Any:
        """What a process answers. Raises what ended it."""
        if answer.result is None:
            raise self._lost(answer.unit, answer.exit_code())
        kind, *values = answer.result
        if kind == "failed":
            raise values[0] from RuntimeError(f"on {answer.unit}:\n{values[1]}")
        return values[0]

    def hear(self, _worker: Worker[U], _now: float) -> None:
        """Nothing: a process reports by itself."""

    def end(self, worker: Worker[U]) -> None:
        """Ends a process: what it has not written is lost."""
        worker.handle.end()


class _Process:
    """A process, and the pipe on which it gets its unit, reports and answers."""

    def __init__(self, context: SpawnContext, work: Callable[[Any, Progress], Any]) -> None:
        self.unit: Any = None
        self.result: tuple[Any, ...] | None = None  # ("done", result) or ("failed", error, traceback)
        self.pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(work, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of its reports

    def has_answered(self, report: Callable[..., object]) -> bool:
        """Takes a message: whether it is the last."""
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return True
        if message[0] not in ("done", "failed"):
            report(*message)
            return False
        self.result = message
        return True

    def exit_code(self) -> int:
        """Waits for the end of the process; negative: the signal that ended it."""
        self._process.join()
        return self._process.exitcode or 0

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


# ---- in a process ----------------------------------------------------------------------------------------------------


def _serve(work: Callable[[Any, Progress], Any], pipe: Connection) -> None:
    """Does one unit, and answers with the result or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its processes
    with suppress(BrokenPipeError, EOFError, ConnectionResetError):  # the command is gone, and nobody waits
        unit = pipe.recv()
        try:
            result = work(unit, _Reports(pipe))
        except BrokenPipeError:
            raise
        except Exception as error:
            said = traceback.format_exc()
            try:
                pipe.send(("failed", error, said))
            except (TypeError, AttributeError, ValueError):  # an error that cannot be sent
                pipe.send(("failed", RuntimeError(f"{type(error).__name__}: {error}"), said))
        else:
            pipe.send(("done", result))


class _Reports:
    """A `Progress` that is shown in another process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, title: str, total: Total, unit: str) -> AbstractContextManager[Tick]:
        return self._phase(title) if not unit else self._stage(title, total() if callable(total) else total, unit)

    @contextmanager
    def _phase(self, title: str) -> Iterator[Tick]:
        self._pipe.send(("phase", title))
        yield lambda _: None
        self._pipe.send(("end", title))

    @contextmanager
    def _stage(self, title: str, total: int | None, unit: str) -> Iterator[Tick]:
        self._pipe.send(("stage", title, total, unit))
        waiting, sent = 0, time.monotonic()

        def tick(count: int) -> None:
            nonlocal waiting, sent
            waiting += count
            if time.monotonic() - sent >= PACE:
                self._pipe.send(("tick", title, waiting))
                waiting, sent = 0, time.monotonic()

        yield tick
        self._pipe.send(("tick", title, waiting))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that are started here ignore Ctrl-C from their first instruction on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
