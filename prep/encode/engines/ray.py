"""Runs tasks on a Ray cluster: an actor on each GPU, or node, that keeps its encoder from one task to the next.

The driver is the command. It sends each actor a few blocks of tasks ahead and gets back what was encoded; rows never
travel. An actor that dies, stops answering, or takes too long for a task is replaced, and its blocks are sent again
(Ray itself repeats nothing). A task that fails three times becomes a finding. Whatever an actor has finished is
committed, so the driver may die, too, and be run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prep.cache.records import Task
from prep.encode.engines.commit import check_failed
from prep.encode.engines.job import Job, Outcome, RayOptions
from prep.encode.engines.local import FIELDS, bar_of
from prep.encode.engines.order import TAKEN
from prep.encode.engines.ray_worker import RayWorker
from prep.errors import UsageError
from prep.findings import Finding
from prep.formatting import counted
from prep.progress import Progress, Tick, silent
from prep.workers.actors import Actors
from prep.workers.crew import ATTEMPTS, Crew, GivenUp
from prep.workers.ray import Share, actors_of, connected, library

AHEAD = 2  # blocks that an actor has: one that it encodes, and the next
# An actor works in a thread, and glibc gives a thread's large blocks back to the system at once, whatever
# `settled_heap` asks for, unless it has the one arena of the process. That is settled as the process starts.
ONE_ARENA = {"env_vars": {"MALLOC_ARENA_MAX": "1"}}


def run(job: Job, options: RayOptions, progress: Progress = silent) -> Outcome:
    """Runs every task of `job` on the cluster; after a request to stop, those under way.

    Raises as `local.run` does, and `UsageError` without a cluster.
    """
    ray = library(options.address)
    if job.device == "all" or "," in job.device:
        raise UsageError(f"--device is '{job.device}' with --engine ray, expected one device",
                         hint="omit --device: each worker of the cluster uses the GPUs that Ray gives to it")
    # By the token, a new directory in the cache, workers tell that they see the same cache.
    with connected(ray, options.address), job.cache.staged() as token:
        share = Share.of(ray, options.workers, 0.0 if options.gpus is None and job.device == "cpu" else options.gpus)
        notes: dict[str, None] = {}
        with ExitStack() as stack:
            bars = _Bars(job, progress, stack)
            crew: Crew[_Block, Outcome] = stack.enter_context(Crew(
                _actors(ray, job, share, token), note=notes.setdefault, split=_by_task, repeat=True, show=bars.show,
                limit=lambda block: options.seconds * len(block.tasks), stopped=lambda: job.claims.stopped))
            outcome = _encoded(job, crew, bars)
        return replace(outcome, notices=(*outcome.notices, *notes))


@dataclass(eq=False, slots=True)
class _Block:
    """Tasks that a worker gets at once."""

    tasks: tuple[Task, ...]
    shown: int = 0  # rows that the progress bar has counted

    @property
    def rows(self) -> int:
        return sum(len(task.rows) for task in self.tasks)


def _blocks(tasks: Sequence[Task]) -> Iterator[_Block]:
    """In the order of fields. Several text tasks go together, because text encoders may be loaded in turn."""
    assert {task.field for task in tasks} <= set(FIELDS), "no task is left out"
    for name in FIELDS:
        some, size = [task for task in tasks if task.field == name], TAKEN if name == "text" else 1
        yield from (_Block(tasks=tuple(some[start:start + size])) for start in range(0, len(some), size))


def _by_task(block: _Block) -> Sequence[_Block]:
    """What is sent again of a block that failed: each task alone, for only one of them may be to blame."""
    return [block] if len(block.tasks) == 1 else [_Block((task,)) for task in block.tasks]


def _actors(ray: Any, job: Job, share: Share, token: Path) -> Actors[_Block]:
    """The actors that encode blocks of a job, each with as many threads as its share of a node has."""
    sent = replace(job, jobs=max(1, job.jobs // share.on_node))
    empty = sent.share(())
    made = actors_of(ray, RayWorker, share, runtime_env=ONE_ARENA)

    def new() -> tuple[Any, Any]:
        actor = made.remote()
        return actor, actor.start.remote(empty, token, version("latentry"), str(Path.cwd()))

    return Actors(ray, share, new, lambda actor, block: actor.encode.remote(sent.share(block.tasks)), ahead=AHEAD)


def _encoded(job: Job, crew: Crew[_Block, Outcome], bars: _Bars) -> Outcome:
    """The sum of the outcomes of all blocks, in the order of the tasks. Raises `CacheError` if too many rows failed."""
    positions = {task.key: number for number, task in enumerate(job.tasks)}
    outcomes: dict[int, Outcome] = {}
    failed = 0
    for block, result in crew.as_completed(_blocks(job.tasks)):
        if isinstance(result, GivenUp):
            last = f"a task failed {ATTEMPTS} times; the last time: {result.said}"
            result = _given_up(job, block, result.said)
        else:
            bars.show(block, block.rows)
            last = result.transient[-1].detail if result.transient else "it is not finite"
        failed += result.failed
        check_failed(failed, job.max_rejects, last)
        outcomes[positions[block.tasks[0].key]] = result
    return Outcome.sum([outcomes[number] for number in sorted(outcomes)])


def _given_up(job: Job, block: _Block, said: str) -> Outcome:
    """The outcome of a task that failed in every attempt: a finding for each picture that training lacks, a notice for
    captions, and for embeddings, whose lack is a warning of each sample."""
    (task,) = block.tasks
    rows = {"latent": job.targets.latents, "mask": job.targets.masks}.get(task.field, {})
    findings = [Finding(path=rows[key].name, code="not-encoded", severity="error",
                        detail=f"{rows[key].file} was not encoded: its task failed {ATTEMPTS} times, the last time "
                               f"because {said}; run the command again") for key in task.rows if key in rows]
    what = {"text": "caption", "embedding": "embedding"}.get(task.field)
    notices = [f"note: {counted(len(task.rows), what)} not encoded: the task failed {ATTEMPTS} times; the last time: "
               f"{said}"] if what else []
    return Outcome(encoded={}, transient=tuple(findings), notices=tuple(notices), failed=1)


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
