"""Gives jobs to keepers, one a device at a time, in the order of their turns."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prep.errors import PathError
from prep.jobs.job import Job, read_job
from prep.jobs.process import NEW_GROUP
from prep.jobs.queue import changing, jobs_of
from prep.runtime import main_of, python

NO_WINDOW = 0x08000000  # CREATE_NO_WINDOW of Windows: a console of its own, which the signal that stops jobs needs
PAUSE = 0.5  # seconds between looks at the queue
STARTS = 20.0  # seconds in which a keeper has to say that it has a job


class Runner:
    """Starts what waits. Jobs go on when it ends: another runner of the project finds them."""

    def __init__(self, project: Path) -> None:
        self._project = project

    def step(self) -> list[Job]:
        """Starts each waiting job whose device is free; the jobs of the project after that. Raises `PathError`."""
        jobs = jobs_of(self._project)
        if not _next(jobs):
            return jobs
        with changing(self._project):
            for job in _next(jobs_of(self._project)):
                self._start(job)
        return jobs_of(self._project)

    def run(self, told: Callable[[list[Job]], object] = lambda _: None) -> None:
        """Goes on until no job waits or runs; `told` gets the jobs after each look."""
        while True:
            jobs = self.step()
            told(jobs)
            if all(job.is_over for job in jobs):
                return
            time.sleep(PAUSE)

    def _start(self, job: Job) -> None:
        """Starts a keeper, and waits until it has the job. Raises `PathError` if it does not take it."""
        apart = {"creationflags": NEW_GROUP | NO_WINDOW} if sys.platform == "win32" else {"start_new_session": True}
        keeper = subprocess.Popen(python(*main_of("prep.jobs.keeper"), str(job.folder)), stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  **apart)
        if sys.platform != "win32":
            keeper.wait()
        deadline = time.monotonic() + STARTS
        while (read_job(job.folder) or job).state == "waiting":
            if time.monotonic() > deadline:
                raise PathError(f"the process that runs job {job.name} did not start",
                                hint=f"look at {job.folder}; is the disk full?")
            time.sleep(0.02)


def _next(jobs: Sequence[Job]) -> list[Job]:
    """The jobs whose turn it is: the device of each is free, and no job before it waits for that."""
    busy = [job.device for job in jobs if job.state == "running"]
    turns = []
    for job in jobs:
        if job.state == "waiting":
            if not any(_same_device(job.device, other) for other in busy):
                turns.append(job)
            busy.append(job.device)
    return turns


def _same_device(first: str, second: str) -> bool:
    """Whether two jobs would share a device: those that name none, or all, may take any, and "cuda" any cuda:N."""
    shared = {"", "auto", "all"}
    if "cuda" in (first, second) and first.startswith("cuda") and second.startswith("cuda"):
        return True
    return first in shared or second in shared or bool(set(first.split(",")) & set(second.split(",")))
