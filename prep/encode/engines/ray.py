"""Runs tasks on a Ray cluster: an actor on each GPU, or node, that keeps its encoder from one task to the next.

The driver is the command. It sends each actor a few blocks of tasks ahead and gets back what was encoded; rows never
travel. An actor that dies, stops answering, or takes too long for a task is replaced, and its blocks are sent again
(Ray itself repeats nothing). A task that fails three times becomes a finding. Whatever an actor has finished is
committed, so the driver may die, too, and be run again.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prep.cache.records import Task
from prep.encode.engines.job import Job, Outcome, RayOptions
from prep.encode.engines.local import TAKEN, bar_of, check_failed
from prep.encode.engines.ray_worker import RayWorker
from prep.errors import UsageError
from prep.findings import Finding
from prep.formatting import counted
from prep.fs import atomic
from prep.progress import Progress, Tick, silent
from prep.workers.actors import ATTEMPTS, PACE, Lost, Worker, Workers
from prep.workers.ray import Failure, Share, actors_of, connected, library

AHEAD = 2  # blocks that an actor has: one that it encodes, and the next
# An actor works in a thread, and glibc gives a thread's large blocks back to the system at once, whatever `kept_heap`
# asks for, unless it has the one arena of the process. That is settled as the process starts.
ONE_ARENA = {"env_vars": {"MALLOC_ARENA_MAX": "1"}}


def run(job: Job, options: RayOptions, progress: Progress = silent) -> Outcome:
    """Runs every task of `job` on the cluster. Raises as `local.run` does, and `UsageError` without a cluster."""
    ray = library(options.address)
    if job.device == "all" or "," in job.device:
        raise UsageError(f"--device is '{job.device}' with --engine ray, expected one device",
                         hint="omit --device: each worker of the cluster uses the GPUs that Ray gives to it")
    with connected(ray, options.address), _token(job) as token:
        cluster = Share.of(ray, options.workers, 0.0 if options.gpus is None and job.device == "cpu" else options.gpus)
        with ExitStack() as stack:
            driver = _Driver(ray, job, cluster, token, options, _Bars(job, progress, stack))
            try:
                return driver.run()
            finally:
                driver.close()


@contextmanager
def _token(job: Job) -> Iterator[Path]:
    """A new directory in the cache, by which workers tell that they see the same one."""
    path = job.cache.stage()
    try:
        yield path
    finally:
        with suppress(OSError):
            atomic.remove_tree(path)


@dataclass(eq=False, slots=True)
class _Block:
    """Tasks that a worker gets at once."""

    tasks: tuple[Task, ...]
    attempts: int = 0  # that failed
    shown: int = 0  # rows that the progress bar has counted

    @property
    def rows(self) -> int:
        return sum(len(task.rows) for task in self.tasks)


@dataclass(eq=False, kw_only=True, slots=True)
class _Worker(Worker):
    """An actor, with what it was sent. `since` is when its first block was begun, if it has one."""

    blocks: deque[tuple[Any, _Block]] = field(default_factory=deque)  # with the references of their outcomes


class _Driver:
    """Sends blocks to workers, collects what they answer, and replaces workers that are lost."""

    def __init__(self, ray: Any, job: Job, cluster: Share, token: Path, options: RayOptions, bars: _Bars) -> None:
        self._ray, self._token, self._limit = ray, token, options.seconds
        self._job, self._bars = replace(job, jobs=max(1, job.jobs // cluster.on_node)), bars
        self._empty = self._job.share(())
        self._class = actors_of(ray, RayWorker, cluster, runtime_env=ONE_ARENA)
        self._left = deque(_blocks(job.tasks))
        self._workers = Workers(ray, cluster, self._new, self._note)
        self._failed = 0
        self._encoded: Counter[str] = Counter()
        self._transient: list[Finding] = []
        self._notices: dict[str, None] = {}

    def run(self) -> Outcome:
        """Encodes all blocks, or after a request to stop, those that are under way."""
        while self._left or any(worker.blocks for worker in self._workers.there):
            if self._job.claims.stopped:
                self._left.clear()
            self._workers.spawn(len(self._left) + sum(len(worker.blocks) for worker in self._workers.there))
            self._feed()
            self._collect()
            self._watch()
        self._workers.note_lost()
        return Outcome(encoded=dict(self._encoded), transient=tuple(self._transient), notices=tuple(self._notices),
                       failed=self._failed)

    def close(self) -> None:
        """Ends all workers."""
        self._workers.close()

    def _new(self) -> _Worker:
        actor = self._class.remote()
        return _Worker(actor=actor, starting=actor.start.remote(self._empty, self._token, version("latentry"),
                                                                str(Path.cwd())))

    def _feed(self) -> None:
        """Sends blocks: first to workers that have none."""
        for depth in range(AHEAD):
            for worker in self._workers.there:
                if worker.starting is None and len(worker.blocks) == depth and self._left:
                    block = self._left.popleft()
                    if not worker.blocks:
                        worker.since = time.monotonic()
                    worker.blocks.append((worker.actor.encode.remote(self._job.share(block.tasks)), block))

    def _collect(self) -> None:
        """Waits a moment for answers, and takes all there are."""
        asked = {worker.starting or worker.blocks[0][0]: worker for worker in self._workers.there
                 if worker.starting is not None or worker.blocks}
        ready, _ = self._ray.wait(list(asked), num_returns=1, timeout=PACE) if asked else ([], [])
        if ready:
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for reference in ready:
            worker = asked[reference]
            try:
                if reference == worker.starting:
                    self._workers.has_started(worker)
                else:
                    self._has_encoded(worker, self._workers.answer(reference))
            except Lost as lost:
                self._lose(worker, str(lost))

    def _has_encoded(self, worker: _Worker, answer: Outcome | Failure) -> None:
        """Takes the answer of a worker's first block."""
        _, block = worker.blocks.popleft()
        worker.since = time.monotonic()
        if self._job.claims.stopped:
            worker.blocks.clear()  # before it begins the next
            self._workers.end(worker)
        if isinstance(answer, Failure):
            if answer.problem is not None:
                raise answer.problem
            self._retry(block, answer.said)
            return
        self._workers.finished()
        self._bars.show(block, block.rows)
        self._encoded.update(answer.encoded)
        self._transient += answer.transient
        for notice in answer.notices:
            self._note(notice)
        self._count(answer.failed, answer.transient[-1].detail if answer.transient else "it is not finite")

    def _lose(self, worker: _Worker, said: str) -> None:
        """Gives a lost worker's blocks to others; only the first was begun. Raises if too many workers are lost."""
        self._workers.lose(worker)
        blocks = [block for _, block in worker.blocks]
        self._left.extendleft(reversed(blocks[1:]))
        if blocks:
            self._retry(blocks[0], said)
        self._workers.check_lost(said)

    def _retry(self, block: _Block, said: str) -> None:
        """Has the tasks of a block done again, one by one; after the last attempt they become findings."""
        attempts = block.attempts + 1
        if attempts < ATTEMPTS:
            self._left.extendleft(_Block(tasks=(task,), attempts=attempts)
                                  for task in reversed(block.tasks))
            return
        self._workers.finished()
        for task in block.tasks:
            self._transient += _findings(self._job, task, said)
            if task.field == "text":
                self._note(f"note: {counted(len(task.rows), 'caption')} not encoded: the task failed {ATTEMPTS} times; "
                           f"the last time: {said}")
            self._count(1, f"a task failed {ATTEMPTS} times; the last time: {said}")

    def _count(self, failed: int, last: str) -> None:
        """Raises `CacheError` if more rows (or whole tasks) failed than may."""
        self._failed += failed
        check_failed(self._failed, self._job.max_rejects, last)

    def _note(self, text: str) -> None:
        self._notices[text] = None

    def _watch(self) -> None:
        """Replaces workers that hang, and shows how far the others are."""
        now = time.monotonic()
        for worker in list(self._workers.there):
            limit = self._limit * len(worker.blocks[0][1].tasks) if worker.blocks else math.inf
            try:
                if worker.starting is None and now - worker.since > limit:
                    raise Lost(f"it took more than {limit:g} s (--task-seconds)")
                rows = self._workers.hear(worker, now)
            except Lost as lost:
                self._lose(worker, str(lost))
                continue
            if worker.blocks and rows is not None:
                self._bars.show(worker.blocks[0][1], rows)


class _Bars:
    """A progress bar for each field; it stays open until all is done, because blocks of two fields may overlap."""

    def __init__(self, job: Job, progress: Progress, stack: ExitStack) -> None:
        self._job, self._progress, self._stack = job, progress, stack
        self._ticks: dict[str, Tick] = {}

    def show(self, block: _Block, rows: int) -> None:
        """Counts rows of a block, each once, however often the block is begun."""
        name = block.tasks[0].field
        if name not in self._ticks:
            self._ticks[name] = self._stack.enter_context(bar_of(self._job, name, self._progress))
        self._ticks[name](max(0, min(rows, block.rows) - block.shown))
        block.shown = max(block.shown, min(rows, block.rows))


def _blocks(tasks: Sequence[Task]) -> Iterator[_Block]:
    """Masks, then text, then latents. Several text tasks go together, because text encoders may be loaded in turn."""
    for name, size in (("mask", 1), ("text", TAKEN), ("latent", 1)):
        some = [task for task in tasks if task.field == name]
        yield from (_Block(tasks=tuple(some[start:start + size])) for start in range(0, len(some), size))


def _findings(job: Job, task: Task, said: str) -> Iterator[Finding]:
    """One for each picture of a task that is given up."""
    works = job.targets.latents if task.field == "latent" else job.targets.masks
    for work in (works[key] for key in task.rows if key in works):
        yield Finding(path=work.name, code="not-encoded", severity="error",
                      detail=f"{work.file} was not encoded: its task failed {ATTEMPTS} times, the last time because "
                             f"{said}; run the command again")
