"""A pool of worker processes, each replaced when it hangs or dies: a bad file costs one `WorkerLost` and no more.

The pool starts a worker when a question finds none idle (0.1 s on an idle machine), so a command without new files
starts none. If no process can be started, this process does the same work, without that protection.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import BinaryIO, Literal, TypeVar, cast

from prep.formatting import format_bytes
from prep.parse import Unparsed
from prep.runtime import main_of, python, stops_held
from prep.workers.protocol import (
    BUG,
    END,
    HEADER,
    MEMORY,
    PART,
    QUESTION,
    READY,
    VERSION,
    TaskHeader,
    decode,
    encode,
    frame_of,
    read_frame,
)
from prep.workers.service import Limits, Service, Task

Question = TypeVar("Question")
Part = TypeVar("Part")

START = 60.0  # seconds until a worker must be ready
POLL_SECONDS = 0.05  # seconds between two checks of the deadlines
MOST_ANSWERED = 1 << 30  # bytes of all parts of an answer, each counted with Python's overhead for it
_PART = 64  # bytes of that overhead: the smallest object
WORKER = main_of("prep.workers.worker")
# The heap keeps its memory between pictures instead of asking the system each time: 4 % less time. One thread for a
# worker's arrays: there are as many workers as processors. Arrow's own allocators reserve more than they use.
_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 27), "MALLOC_TRIM_THRESHOLD_": str(1 << 27),
             "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}

Cause = Literal["slow", "crash", "memory", "closed"]
FINDINGS: Mapping[Cause, tuple[str, str]] = {  # code and detail of the finding on a file that cost its decoder
    "slow": ("decoder-hung", "was not decoded within {seconds:g} seconds"),
    "memory": ("too-large", "takes more memory than there is"),
    "crash": ("decoder-crashed", "crashed its decoder, which ended {how}"),
    "closed": ("decoder-crashed", "was not decoded: {how}"),
}


class WorkerLost(Exception):
    """A question without an answer: its worker was too slow, crashed, took too much memory, or was closed."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause: Cause = cause
        self.detail = detail  # how the worker ended, for messages: "by SIGSEGV"

    def finding(self, limits: Limits) -> tuple[str, str]:
        """Code and detail of the finding on a file that a worker of these limits should have decoded."""
        code, detail = FINDINGS[self.cause]
        return code, detail.format(seconds=limits.seconds, how=self.detail)


class WorkerPool:
    """Workers of a service, shared by any number of threads; there are as many as questions at a time.

    With `most`, no more questions than that are asked at a time: other threads wait for their turn.
    """

    def __init__(self, service: Service, *, processes: bool = True, command: Sequence[str] = WORKER,
                 most: int | None = None) -> None:
        self._turns = nullcontext() if most is None else threading.BoundedSemaphore(most)
        self._command = (*command, service.module)
        self._processes = processes and can_spawn()
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self.closed = threading.Event()  # also ends what threads read from stores for their questions
        self._watch = threading.Thread(target=self._kill_overdue, daemon=True)
        self.started = 0  # workers, in total

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        self.close()

    def ask(self, task: Task[Question, Part], question: Question, limits: Limits) -> list[Part]:
        """The parts of the answer to a question. Raises `WorkerLost` if its worker ends before the last part."""
        with self._turns:
            return self._ask(task, question, limits)

    def _ask(self, task: Task[Question, Part], question: Question, limits: Limits) -> list[Part]:
        worker = self._take()
        if worker is None:
            return _done_here(task, question)
        try:
            header = frame_of(HEADER, TaskHeader(task.name, limits.seconds, limits.memory))
            message = header + frame_of(QUESTION, question)
        except MemoryError:
            self._give_back(worker)
            raise _too_much(limits) from None
        if not worker.send(message, limits.seconds):  # it died before this question, so the question is not to blame
            self._end(worker)
            worker = self._take(fresh=True)
            if worker is None:
                return _done_here(task, question)
            worker.send(message, limits.seconds)
        try:
            parts, ending = _received(worker, task.part)
        except Unparsed as error:
            raise self._lost(worker, f"with an invalid answer: {error}") from None
        if ending is None:
            raise self._lost(worker)
        if ending == MEMORY:
            self._end(worker)  # frees its memory
            raise _too_much(limits)
        self._give_back(worker)
        return parts

    def close(self) -> None:
        """Ends all workers, busy or not."""
        self.closed.set()
        for worker in list(self._all):
            self._end(worker)

    def _take(self, *, fresh: bool = False) -> _Worker | None:
        """An idle worker or a new one; `None` if none can be started, and this process does the work."""
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
            if self.closed.is_set():
                raise WorkerLost("closed", "the command ended before")
            if not self._processes:
                return None
        worker = _start(self._command)
        with self._lock:
            if worker is not None:
                self._all.add(worker)
                if not self._watch.is_alive() and not self.closed.is_set():  # it ended if this was closed meanwhile
                    self._watch.start()
        ready = worker is not None and worker.ready()
        with self._lock:
            self.started += ready
            self._processes = ready or self.closed.is_set()
        if worker is not None and (not ready or self.closed.is_set()):
            self._end(worker)
        return worker if ready else self._take() if self.closed.is_set() else None

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def _lost(self, worker: _Worker, how: str = "") -> WorkerLost:
        code = self._end(worker, patience=0 if worker.late or how else 1.0)
        if worker.late:
            return WorkerLost("slow", f"more than {worker.seconds:g} seconds")
        return WorkerLost("crash", how or _ending(code))

    def _end(self, worker: _Worker, *, patience: float = 0) -> int | None:
        with self._lock:
            self._all.discard(worker)
        return worker.end(patience)

    def _kill_overdue(self) -> None:
        while not self.closed.wait(POLL_SECONDS):
            with self._lock:
                workers = list(self._all)
            for worker in workers:
                worker.end_if_late()


class _Worker:
    """One process, used by one thread at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin, self._stdout = cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + START
        self.late = False
        self.seconds = START

    def ready(self) -> bool:
        """Waits until the process is ready; `False` if it never is."""
        try:
            return next(self.frames(), None) == (READY, VERSION)
        except Unparsed:
            return False

    def send(self, message: bytearray, seconds: float) -> bool:
        """Writes the message and starts its deadline of `seconds`; `False` if the process had ended before."""
        with self._lock:
            self.seconds = seconds
            self._deadline = time.monotonic() + seconds
        try:
            self._stdin.write(message)
            self._stdin.flush()
        except (OSError, ValueError):  # closed
            return self.late
        return True

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """The frames from the process, until its deadline passes or it ends. Raises `Unparsed`."""
        while True:
            try:
                frame = read_frame(self._stdout)
            except Unparsed:
                raise
            except (OSError, ValueError):  # closed
                frame = None
            with self._lock:
                if frame is None or frame[0] != PART:
                    self._deadline = float("inf")
                if frame is None or self.late:
                    return
            yield frame

    def end_if_late(self) -> None:
        """Ends the process if its deadline has passed, which wakes the thread that waits for it."""
        with self._lock:
            if time.monotonic() > self._deadline:
                self.late = True
                self._process.kill()

    def end(self, patience: float = 0) -> int | None:
        """Ends the process, after waiting `patience` seconds for it; its exit code, `None` if even killing it fails."""
        code = None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
        for stream in (self._stdin, self._stdout):
            with suppress(OSError, ValueError):
                stream.close()
        return code


def can_spawn() -> bool:
    """Whether this program runs in a Python interpreter that can be started again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _received(worker: _Worker, kind: type[Part]) -> tuple[list[Part], int | None]:
    """(parts of an answer, END, MEMORY or `None` if it is cut off). Raises `Unparsed`, or `RuntimeError` for a bug."""
    parts: list[Part] = []
    total = 0
    for what, body in worker.frames():
        total += len(body) + _PART
        if what == BUG:
            raise RuntimeError(f"in a worker: {body.decode('utf-8', 'replace')}")
        if what in (END, MEMORY):
            return parts, what
        if what != PART or total > MOST_ANSWERED:
            raise Unparsed(f"frame of kind {what} after {total} bytes")
        parts.append(decode(body, kind))
    return parts, None


def _done_here(task: Task[Question, Part], question: Question) -> list[Part]:
    """The same answer, computed in this process, encoded and decoded as if it came from a worker."""
    try:
        return [decode(encode(part), task.part) for part in task.work(decode(encode(question), task.question))]
    except MemoryError:
        raise WorkerLost("memory", "more memory than there is") from None


def _too_much(limits: Limits) -> WorkerLost:
    return WorkerLost("memory", f"more than {format_bytes(limits.memory)} of memory")


def _start(command: Sequence[str]) -> _Worker | None:
    """A new worker, not ready yet; `None` if no process can be started.

    It never gets the signals that ask to stop: clusters send them to all processes of a job, and the task under way may
    still need its worker.
    """
    try:
        with stops_held():
            return _Worker(subprocess.Popen(python(*command), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, env={**os.environ, **_SETTINGS}))
    except OSError:
        return None


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"
