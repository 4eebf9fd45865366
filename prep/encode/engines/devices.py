"""Runs tasks on one device in this process, or on several in one process each, which all work on one plan.

A process claims a task before it encodes it, so none is encoded twice, and a fast device takes more tasks than a slow
one. What a process finishes is committed at once; when one fails, the others are ended, and the next run continues.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from prep.encode.engines import local
from prep.encode.engines.claims import SharedClaims
from prep.encode.engines.job import Job, Outcome
from prep.errors import OutOfMemoryError
from prep.progress import Progress, Tick, Total, silent
from prep.runtime import defer_interrupts, safe_path, stops_held

PACE = 0.2  # seconds between two messages of a progress bar


def run(job: Job, progress: Progress = silent) -> Outcome:
    """Runs every task of `job` on the devices that it names. Raises as `local.run` does, and `UsageError`."""
    devices = _devices(job.device)
    if len(devices) == 1:
        return local.run(replace(job, device=devices[0]), progress)
    context = multiprocessing.get_context("spawn")  # a fork would share the CUDA context and the locks of threads
    with safe_path():  # a lock starts a process, too
        claims = SharedClaims(context, [task.key for task in job.tasks])
    job.claims.tell(claims)
    share = replace(job, jobs=max(1, job.jobs // len(devices)), claims=claims)
    workers: list[_Worker] = []
    try:
        with _interrupts_ignored(), stops_held(), safe_path():
            for device in devices:
                workers.append(_Worker(context, replace(share, device=device), devices.count("cpu")))
        return _collected(workers, progress)
    finally:
        for worker in workers:
            worker.end()


def _devices(text: str) -> Sequence[str]:
    """The devices in the text of `--device`. Raises `UsageError` for several of which one is not there."""
    if text != "all" and "," not in text:
        return [text]  # checked when a model is loaded: masks need none, and no torch
    with defer_interrupts():
        from prep.models.tensors import device_names  # here: as above

    return device_names(text)


class _Worker:
    """A process that encodes on one device, and the pipe on which it reports."""

    def __init__(self, context: SpawnContext, job: Job, on_cpu: int) -> None:
        self.device = job.device
        self.reports, theirs = context.Pipe(duplex=False)
        self._process: SpawnProcess = context.Process(
            target=_work, args=(job, theirs, on_cpu), name=f"encode on {job.device}", daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of its reports

    def end(self) -> None:
        """Ends the process, whatever it is doing: what it has not committed is not in the cache."""
        self._process.kill()
        self._process.join()
        self.reports.close()

    def lost(self) -> Exception:
        """Why a process that ended without a last report is gone."""
        self._process.join()
        code = self._process.exitcode or 0
        if code == -getattr(signal, "SIGKILL", 9):
            return OutOfMemoryError(f"the process that encodes on {self.device} was killed; the computer has probably "
                                    "too little memory for one process per device",
                                    hint="name fewer devices in --device; run the same command again: finished work "
                                    "is kept")
        return RuntimeError(f"the process that encodes on {self.device} ended with exit code {code}")


def _collected(workers: Sequence[_Worker], progress: Progress) -> Outcome:
    """The sum of the outcomes of all workers. Raises what the first of them to fail raised."""
    outcomes: list[Outcome] = []
    busy = {worker.reports: worker for worker in workers}
    with ExitStack() as stack:
        bars = _Bars(progress, stack)
        while busy:
            for ready in wait(list(busy)):
                worker = busy[ready]  # type: ignore[index]
                try:
                    kind, *told = worker.reports.recv()
                except EOFError:
                    raise worker.lost() from None
                if kind == "failed":
                    raise told[0] from RuntimeError(f"on {worker.device}:\n{told[1]}")
                if kind == "done":
                    outcomes.append(told[0])
                    del busy[worker.reports]
                else:
                    bars.told(kind, *told)
    encoded: Counter[str] = sum((Counter(one.encoded) for one in outcomes), Counter())
    return Outcome(encoded=dict(encoded), transient=tuple(chain.from_iterable(one.transient for one in outcomes)),
                   notices=tuple(dict.fromkeys(chain.from_iterable(one.notices for one in outcomes))))


class _Bars:
    """Progress of all workers: stages of the same title share a bar."""

    def __init__(self, progress: Progress, stack: ExitStack) -> None:
        self._progress, self._stack = progress, stack
        self._ticks: dict[str, Tick] = {}
        self._phases: Counter[str] = Counter()
        self._open: dict[str, ExitStack] = {}

    def told(self, kind: str, title: str, *values: Any) -> None:
        if kind == "tick":
            self._ticks[title](*values)
        elif kind == "stage" and title not in self._ticks:  # it stays open until all is done
            self._ticks[title] = self._stack.enter_context(self._progress(title, *values))
        elif kind == "phase":
            self._phases[title] += 1
            if self._phases[title] == 1:
                self._open[title] = self._stack.enter_context(ExitStack())
                self._open[title].enter_context(self._progress(title, None, ""))
        elif kind == "end":
            self._phases[title] -= 1
            if not self._phases[title]:
                self._open.pop(title).close()


# ---- in a worker -----------------------------------------------------------------------------------------------------


def _work(job: Job, reports: Connection, on_cpu: int) -> None:
    """Runs the tasks that this process can claim, and reports the outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its processes
    if job.device == "cpu":
        from prep.models.tensors import share_cpu  # here: as above

        share_cpu(on_cpu)
    with suppress(BrokenPipeError):  # the command is gone, and nobody waits for the rest
        try:
            outcome = local.run(job, _Reports(reports))
        except BrokenPipeError:
            raise
        except Exception as error:
            said = traceback.format_exc()
            try:
                reports.send(("failed", error, said))
            except (TypeError, AttributeError, ValueError):  # an error that cannot be sent
                reports.send(("failed", RuntimeError(f"{type(error).__name__}: {error}"), said))
        else:
            reports.send(("done", outcome))


class _Reports:
    """A `Progress` that is shown in another process."""

    def __init__(self, reports: Connection) -> None:
        self._reports = reports

    def __call__(self, title: str, total: Total, unit: str) -> AbstractContextManager[Tick]:
        return self._phase(title) if not unit else self._stage(title, total() if callable(total) else total, unit)

    @contextmanager
    def _phase(self, title: str) -> Iterator[Tick]:
        self._reports.send(("phase", title))
        yield lambda _: None
        self._reports.send(("end", title))

    @contextmanager
    def _stage(self, title: str, total: int | None, unit: str) -> Iterator[Tick]:
        self._reports.send(("stage", title, total, unit))
        waiting, told = 0, time.monotonic()

        def tick(count: int) -> None:
            nonlocal waiting, told
            waiting += count
            if time.monotonic() - told >= PACE:
                self._reports.send(("tick", title, waiting))
                waiting, told = 0, time.monotonic()

        yield tick
        self._reports.send(("tick", title, waiting))


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
