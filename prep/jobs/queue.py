"""The jobs of a project in their order: added, moved, stopped, run again and removed.

    PROJECT/jobs/order.json   {"format": "latentry/job-order", "version": 1, "names": […]}: jobs in the order of their
                              turns; those that it does not name come after, by number
    PROJECT/jobs/lock         held while a job is added, moved or given to its keeper
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prep.errors import PathError, UsageError
from prep.fs import atomic
from prep.fs.lock import try_exclusive
from prep.fs.untrusted import append_regular, entries, read_regular
from prep.jobs.job import (
    DIGITS,
    FOLDER,
    FORMAT,
    MOST,
    VERSION,
    Job,
    Stop,
    checked_words,
    read_job,
    read_jobs,
    written_by,
)
from prep.jobs.process import end
from prep.parse import Unparsed, expect, list_of

ORDER, ORDER_VERSION = "latentry/job-order", 1
PATIENCE = 30.0  # seconds to wait for another that changes the queue: longer than a keeper takes to start


def jobs_of(project: Path) -> list[Job]:
    """All jobs: those that are over or run, by number, then those that wait, in the order of their turns. Raises
    `PathError` if the project is no directory."""
    jobs = read_jobs(project)
    turns = {name: turn for turn, name in enumerate(_order(project))}
    waiting = [job for job in jobs if job.state == "waiting"]
    waiting.sort(key=lambda job: (turns.get(job.name, len(turns)), int(job.name)))
    return [job for job in jobs if job.state != "waiting"] + waiting


def job_of(project: Path, name: str) -> Job:
    """The job of this number. Raises `PathError` if there is none."""
    job = read_job(project / FOLDER / name.zfill(DIGITS)) if name.isdecimal() else None
    if job is None:
        raise PathError(f"there is no job {name} in {project}", hint=f"prep jobs list {project}")
    return job


def add(project: Path, words: Sequence[str]) -> Job:
    """A new job, which waits for its turn. Raises `UsageError` for a command that is none of ours, `PathError` if the
    project is no directory."""
    checked = checked_words(words)
    with changing(project):
        number = max((int(job.name) for job in read_jobs(project)), default=0)
        while os.path.lexists(folder := project / FOLDER / str(number + 1).zfill(DIGITS)):
            number += 1
        body = {"format": FORMAT, "version": VERSION, "words": checked, "added": time.time()}
        with atomic.new_directory(folder) as staged:
            atomic.write_synced(staged / "job.json", json.dumps(body, indent=1).encode() + b"\n")
    return job_of(project, folder.name)


def again(project: Path, name: str) -> Job:
    """A new job with the command of one that is over; a run of training that has checkpoints goes on from the last.

    Raises `UsageError` for a job that waits or runs.
    """
    job = job_of(project, name)
    if not job.is_over:
        raise UsageError(f"job {job.name} is {job.state}, expected one that is over", hint=f"prep jobs list {project}")
    return add(project, _continued(job, project))


def _continued(job: Job, project: Path) -> Sequence[str]:
    """`train run … -o RUN` as `train run --resume -o RUN` on the same device, if the run has a checkpoint."""
    if job.words[:2] != ("train", "run") or "--resume" in job.words:
        return job.words
    for output in written_by(job):
        if any((project / output / "checkpoints").glob("step-*")):
            return ["train", "run", "--resume", "-o", output, *(["--device", job.device] if job.device else [])]
    return job.words


def stop(project: Path, name: str, how: Stop = "soon") -> Job:
    """Asks a job that runs to stop: "soon", after what it is at, or "now". One that waits is removed.

    Raises `UsageError` for a job that is over.
    """
    job = job_of(project, name)
    if job.state == "waiting":
        with suppress(UsageError):  # it has begun meanwhile
            return remove(project, name)
        job = job_of(project, name)
    if job.is_over:
        raise UsageError(f"job {job.name} is over: {job.state}", hint=f"prep jobs list {project}")
    atomic.write_passing(job.folder / "stop.request", how.encode() + b"\n")
    if job.alone is not None:  # no keeper reads that
        end(job.alone, now=how == "now")
    return job_of(project, name)


def first(project: Path, name: str) -> Job:
    """Gives a job that waits the next turn. Raises `UsageError` for one that does not wait."""
    with changing(project):
        job = job_of(project, name)
        if job.state != "waiting":
            raise UsageError(f"job {job.name} is {job.state}, expected one that waits",
                             hint=f"prep jobs list {project}")
        names = [other.name for other in jobs_of(project) if other.state == "waiting" and other.name != job.name]
        _put_order(project, [job.name, *names])
    return job


def remove(project: Path, name: str) -> Job:
    """Removes a job that does not run, and its log. Raises `UsageError` for one that runs."""
    with changing(project):
        job = job_of(project, name)
        if job.state == "running":
            raise UsageError(f"job {job.name} runs, expected one that does not",
                             hint=f"prep jobs stop {project} {job.name}")
        order = _order(project)
        if job.name in order:  # a later job may get its number, and not its turn
            _put_order(project, [other for other in order if other != job.name])
        with atomic.staged(job.folder) as gone:  # renamed first: half of a job is another one, which may wait
            atomic.rename(job.folder, gone)
    return job


@contextmanager
def changing(project: Path) -> Iterator[None]:
    """Holds the queue's lock. Raises `PathError` if the project is no directory, or another holds the lock for long."""
    if not project.is_dir():
        raise PathError(f"there is no directory {project}", hint="name the directory of a project")
    atomic.make_dirs(project / FOLDER, mode=0o700)  # whoever may write there has commands run as its owner
    with append_regular(project / FOLDER / "lock") as handle:
        deadline = time.monotonic() + PATIENCE
        while (release := try_exclusive(handle)) is None:
            if time.monotonic() > deadline:
                raise PathError(f"another process has been changing the jobs of {project} for {PATIENCE:g} seconds",
                                hint="wait for it to finish, then try again")
            time.sleep(0.05)
        try:
            for entry in entries(project / FOLDER):
                if atomic.is_partial(Path(entry.path)):  # a crash left it: these are made under the lock alone
                    atomic.remove_tree(Path(entry.path))
            yield
        finally:
            release()


def _put_order(project: Path, names: Sequence[str]) -> None:
    body = {"format": ORDER, "version": ORDER_VERSION, "names": names}
    atomic.write_atomic(project / FOLDER / "order.json", json.dumps(body).encode() + b"\n")


def _order(project: Path) -> list[str]:
    with suppress(OSError, ValueError, RecursionError, Unparsed):
        body = expect(json.loads(read_regular(project / FOLDER / "order.json", MOST)), dict, "the order")
        if body.get("format") == ORDER and body.get("version") == ORDER_VERSION:
            return list_of(body.get("names"), lambda name, where: expect(name, str, where), "names")
    return []
