"""Worker processes that decode, each replaced when it hangs or dies: one bad picture is one `Lost`, and nothing more.

A worker is started when one is needed and none is idle (0.2 s on an idle machine), so a scan of files that did not
change starts none, and one of a few pictures no more than it has. Where no process can be started, the same is done in
this one, without that protection.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from prep.parse import Unparsed
from prep.scan.protocol import pack, read_frame, unpack, write_frame
from prep.scan.worker import READY, answer

SECONDS = 60.0  # for one picture; the largest that are decoded take 10
GRACE = 10.0  # seconds after which a worker whose scan is gone ends itself
MEMORY = 8 << 30  # bytes of address space; 2^28 pixels of 16 bits with alpha take 6 GiB
START = 60.0  # seconds until a worker must be ready
POLL_SECONDS = 0.05  # seconds between two looks at the time
# Not `-m`: what is in PYTHONPATH stands before Python's own modules, and so would all of its packages there.
WORKER = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from prep.scan.worker import main; main()"
# Heaps grow and stay instead of being fetched from the system for every picture: 4 % less time. One thread for each
# worker's arrays: there are as many workers as processors.
_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 27), "MALLOC_TRIM_THRESHOLD_": str(1 << 27),
             "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class WorkerLost(Exception):
    """A request that no worker lived to answer. `code` is one of codes.CODES."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class WorkerPool:
    """Workers that any number of threads may ask; as many are started as are asked at a time."""

    def __init__(self, *, seconds: float = SECONDS, memory: int = MEMORY, processes: bool = True,
                 command: Sequence[str] = ("-c", WORKER)) -> None:
        self._seconds = seconds
        self._command = [sys.executable, "-P", *command, str(int(seconds + GRACE)), str(memory)]
        self._processes = processes and can_spawn()
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._kill_overdue, daemon=True)
        self.started = 0  # workers, over all

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        self.close()

    def request(self, do: str, **what: Any) -> tuple[Mapping[str, Any], bytes]:
        """The answer of a worker (see `prep.scan.worker.answer`). Raises `Lost` when it hung or died of it."""
        request = pack({"do": do, **what})
        worker = self._take()
        if worker is None:
            return unpack(answer(request))
        reply = worker.ask(request, self._seconds)
        if reply is None and not worker.began:  # it was dead before: that is nobody's fault
            self._end(worker)
            worker = self._take(fresh=True)
            if worker is None:
                return unpack(answer(request))
            reply = worker.ask(request, self._seconds)
        if reply is None:
            raise self._lost(worker)
        try:
            document, data = unpack(reply)
        except Unparsed:
            raise self._lost(worker) from None
        if "bug" in document:
            raise RuntimeError(f"in a worker: {document['bug']}")
        with self._lock:
            self._idle.append(worker)
        if "memory" in document:
            raise WorkerLost("too-large", "takes more memory than there is")
        return document, data

    def close(self) -> None:
        """Ends all workers, whatever they do."""
        self._closed.set()
        for worker in list(self._all):
            self._end(worker)

    def _take(self, *, fresh: bool = False) -> _Worker | None:
        """An idle worker or a new one; `None` where there are none, and the work is done here."""
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
            if self._closed.is_set():
                raise WorkerLost("decoder-crashed", "the scan ended before it was decoded")
            if not self._processes:
                return None
        worker = _start(self._command)
        with self._lock:
            if worker is not None:
                self._all.add(worker)
                if not self._watch.is_alive():
                    self._watch.start()
        ready = worker is not None and worker.ready()
        with self._lock:
            self.started += ready
            self._processes = ready or self._closed.is_set()
        if worker is not None and (not ready or self._closed.is_set()):
            self._end(worker)
        return worker if ready else self._take() if self._closed.is_set() else None

    def _lost(self, worker: _Worker) -> WorkerLost:
        code = self._end(worker, patience=0 if worker.late else 1.0)
        if worker.late:
            return WorkerLost("decoder-hung", f"was not decoded within {self._seconds:g} seconds")
        return WorkerLost("decoder-crashed", f"the decoder ended {_ending(code)}")

    def _end(self, worker: _Worker, *, patience: float = 0) -> int | None:
        with self._lock:
            self._all.discard(worker)
        return worker.end(patience)

    def _kill_overdue(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            with self._lock:
                workers = list(self._all)
            for worker in workers:
                worker.end_if_late()


class _Worker:
    """One process, asked by one thread at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin, self._stdout = cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + START
        self.late = False
        self.began = False  # the last request reached it

    def ready(self) -> bool:
        """Waits until it can be asked; whether it can."""
        return self._answered() == READY

    def ask(self, request: bytes, seconds: float) -> bytes | None:
        """The answer; `None` when there is none within that time, or no process any more."""
        self.began = False
        with self._lock:
            self._deadline = time.monotonic() + seconds
        try:
            write_frame(self._stdin, request)
        except (OSError, ValueError):
            return None
        self.began = True
        return self._answered()

    def _answered(self) -> bytes | None:
        try:
            reply = read_frame(self._stdout)
        except (OSError, ValueError):
            reply = None
        with self._lock:
            self._deadline = float("inf")
            return None if self.late else reply

    def end_if_late(self) -> None:
        """Ends the process when its time is over; the thread that waits for it goes on."""
        with self._lock:
            if time.monotonic() > self._deadline:
                self.late = True
                self._process.kill()

    def end(self, patience: float = 0) -> int | None:
        """Ends the process, unless it does so itself in time; its exit code, `None` when no system can end it."""
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
    """Whether this program is run by a Python that can be started again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _start(command: Sequence[str]) -> _Worker | None:
    """A worker that gets ready; `None` where none can be started."""
    try:
        return _Worker(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env={**os.environ, **_SETTINGS}))
    except OSError:
        return None


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"
