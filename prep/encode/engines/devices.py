"""Runs tasks on one device in this process, or on several in one process each, which all work on one plan.

A process claims a task before it encodes it, so none is encoded twice, and a fast device takes more tasks than a slow
one. What a process finishes is committed at once; when one fails, the others are ended, and the next run continues.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from prep.encode.engines import local
from prep.encode.engines.claims import SharedClaims
from prep.encode.engines.job import Outcome, PictureJob
from prep.errors import OutOfMemoryError
from prep.progress import Progress, Tick, silent
from prep.runtime import defer_interrupts, safe_path
from prep.workers.crew import Crew
from prep.workers.processes import Processes


def run(job: PictureJob, progress: Progress = silent) -> Outcome:
    """Runs every task of `job` on the devices that it names. Raises as `local.run` does, and `UsageError`."""
    devices = _devices(job.device)
    if len(devices) == 1:
        return local.run(replace(job, device=devices[0]), progress)
    context = multiprocessing.get_context("spawn")  # a fork would share the CUDA context and the locks of threads
    with safe_path():  # a lock starts a process, too
        claims = SharedClaims(context, [task.key for task in job.tasks])
    job.claims.tell(claims)
    share = replace(job, jobs=max(1, job.jobs // len(devices)), claims=claims)
    with ExitStack() as stack:
        host = Processes(context, partial(_encode, share, devices.count("cpu")), len(devices), _lost,
                         Bars(progress, stack).report)
        crew: Crew[str, Outcome] = stack.enter_context(Crew(host))
        return Outcome.sum([outcome for outcome in crew.in_order(devices) if isinstance(outcome, Outcome)])


def _devices(text: str) -> Sequence[str]:
    """The devices in the text of `--device`. Raises `UsageError` for several of which one is not there."""
    if text != "all" and "," not in text:
        return [text]  # checked when a model is loaded: masks need none, and no torch
    with defer_interrupts():
        from prep.models.tensors import device_names  # here: as above

    return device_names(text)


def _lost(device: str, code: int) -> Exception:
    """Why a process that ended without an answer is gone."""
    if code == -getattr(signal, "SIGKILL", 9):
        return OutOfMemoryError(f"the process that encodes on {device} was killed; the computer has probably too "
                                "little memory for one process per device",
                                hint="name fewer devices in --device; run the same command again: finished work is "
                                "kept")
    return RuntimeError(f"the process that encodes on {device} ended with exit code {code}")


def _encode(job: PictureJob, on_cpu: int, device: str, progress: Progress) -> Outcome:
    """In a process: runs the tasks that it can claim."""
    if device == "cpu":
        from prep.models.tensors import share_cpu  # here: as above

        share_cpu(on_cpu)
    return local.run(replace(job, device=device), progress)


class Bars:
    """Progress of all processes: stages of the same title share a bar."""

    def __init__(self, progress: Progress, stack: ExitStack) -> None:
        self._progress, self._stack = progress, stack
        self._ticks: dict[str, Tick] = {}
        self._phases: Counter[str] = Counter()
        self._open: dict[str, ExitStack] = {}

    def report(self, kind: str, title: str, *values: Any) -> None:
        """Shows what a process reports, in the words of `prep.workers.processes`."""
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
