"""Orders the tasks of a plan for one process among others that follow it, and decodes ahead of the encoder."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain, groupby, islice
from typing import Any

from prep.cache.ledger.ledger import is_done
from prep.cache.records import Task
from prep.encode.engines.job import PictureJob
from prep.encode.engines.tools import FETCHERS, Tools
from prep.encode.targets.records import PictureTarget
from prep.fs.blob import waits
from prep.workers.pool import WorkerPool

TAKEN = 8  # tasks of text that a process takes at once, if there are several
Make = Callable[[PictureJob, PictureTarget, WorkerPool], Any]


def tasks_left(job: PictureJob, tasks: Sequence[Task]) -> Iterator[Task] | None:
    """The tasks that are left for this process; `None` if there are none, so that no model is loaded for them."""
    tasks_here = unfinished(job, from_random_start(tasks))
    first = next(tasks_here, None)
    return None if first is None else chain([first], tasks_here)


def from_random_start(tasks: Sequence[Task]) -> deque[Task]:
    """The tasks, from a random one on, so that processes that follow the same plan start at different places."""
    ordered = deque(tasks)
    ordered.rotate(-start_at(ordered))
    return ordered


def unfinished(job: PictureJob, tasks: deque[Task]) -> Iterator[Task]:
    """Takes from `tasks` those that no other process has finished by the time they are reached, nor one of this run
    has taken.

    When it reaches a finished task it jumps to a random place, since another process is probably working on the tasks
    that follow.
    """
    while tasks:
        task = tasks.popleft()
        if not job.claims.take(task.key):
            continue
        if is_done(job.cache, task.key):
            tasks.rotate(-start_at(tasks))
        else:
            yield task


def with_next(job: PictureJob, ours: Iterator[Task], rest: Iterable[Task]) -> Iterator[tuple[Task, list[Task]]]:
    """Each task, with itself and those that this process will probably encode after it.

    Processes of one run take several tasks at once, because each must load every text encoder for what it takes.
    """
    while block := list(islice(ours, TAKEN if job.claims.shared else 1)):
        for number, task in enumerate(block):
            yield task, [*block[number:], *(() if job.claims.shared else rest)]


def start_at(tasks: Sequence[Task]) -> int:
    """A random index of `tasks` to start at; it affects no byte of the result."""
    return secrets.randbelow(len(tasks)) if tasks else 0


def made_ahead(job: PictureJob, tasks: Iterable[Task], tools: Tools, make: Make,
               targets: Mapping[str, PictureTarget]) -> Iterator[tuple[Task, Iterator[tuple[str, Any]]]]:
    """Each task with its (key, made) pairs in order; the pool works two batches ahead, across tasks."""
    for task, results in groupby(_in_order(job, tasks, tools, make, targets), key=lambda result: result[0]):
        if job.claims.stopped:
            return
        yield task, ((key, made) for _, key, made in results)


def _in_order(job: PictureJob, tasks: Iterable[Task], tools: Tools, make: Make,
              targets: Mapping[str, PictureTarget]) -> Iterator[tuple[Task, str, Any]]:
    rows = ((task, key) for task in tasks for key in task.rows)
    window: deque[tuple[Task, str, Future[Any]]] = deque()
    for task, key in rows:
        window.append((task, key, tools.pool.submit(make, job, targets[key], tools.workers)))
        if len(window) >= 2 * job.batch_size + job.jobs + (FETCHERS if waits(targets[key].blob) else 0):
            first, name, future = window.popleft()
            yield first, name, future.result()
    for first, name, future in window:
        yield first, name, future.result()
