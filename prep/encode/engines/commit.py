"""Commits the rows of a task, and counts those that were encoded and those that failed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from prep.cache.ledger.ledger import write_commit
from prep.cache.records import Reject, Shard, Task
from prep.cache.writer import ShardWriter
from prep.digest import digest_json
from prep.encode.engines.job import PictureJob, provenance
from prep.encode.engines.rows import NOT_FINITE
from prep.encode.targets.records import Made
from prep.errors import CacheError
from prep.findings import Finding
from prep.formatting import counted
from prep.progress import Tick

Row = TypeVar("Row")


class Tally:
    """Counts encoded rows and failed rows."""

    def __init__(self, job: PictureJob) -> None:
        self.encoded: Counter[str] = Counter()
        self.transient: list[Finding] = []
        self.notices: list[str] = []
        self.failed = 0  # rows, in this process
        self._limit = job.max_rejects
        self._claims = job.claims

    def refuse(self, what: Reject | Finding) -> None:
        """Counts a failed row, unless its picture is bad: bad pictures do not count as failures of the run.

        Raises `CacheError` if there are too many.
        """
        if isinstance(what, Finding):
            self.transient.append(what)
        elif what.code != NOT_FINITE:
            return
        self.failed += 1
        check_failed(self._claims.failed(), self._limit, what.detail)

    def note_batches(self, batches: Any, unit: str, advice: str) -> None:
        """Adds a notice if the device's memory did not hold the batches of this size."""
        if batches.refused is not None:
            self.notices.append(f"note: {batches.device} had too little memory for {batches.refused} {unit} at a "
                                f"time, so they were encoded {batches.size} at a time{advice}")


def check_failed(failed: int, most: int, last: str) -> None:
    """Raises `CacheError` if more rows failed than may; `last` says how the last one did."""
    if failed > most:
        raise CacheError(f"{counted(failed, 'row')} failed (a latent that is not finite, a file that changed "
                         f"meanwhile, a decoder that crashed), more than --max-rejects {most}; the last: {last}",
                         hint="--compute float32 helps if latents are not finite; bad pictures do not count")


def commit_task(job: PictureJob, task: Task, rows: Iterable[tuple[str, Made]], tally: Tally, device: str,
                stop: threading.Event) -> None:
    """Writes a task's shard and then its commit; an interruption while rows are made leaves nothing."""
    begun, failed = time.monotonic(), len(tally.transient)
    rejects: list[Reject] = []
    made_keys: list[str] = []
    with ShardWriter(job.cache, task.field, job.arrays_of(task)) as writer:
        for key, made in rows:
            if isinstance(made, Reject | Finding):
                tally.refuse(made)
                rejects += [made] if isinstance(made, Reject) else []
            else:
                writer.add(key, made)
                made_keys.append(key)
        shard: Shard | None = writer.finish(stop=stop) if writer.rows else None
    tally.encoded[task.field] += 0 if shard is None else shard.rows
    if len(tally.transient) > failed:  # the task is not finished; its known rows are committed as a separate task
        known = sorted([*made_keys, *(reject.key for reject in rejects)])
        if not known:
            return
        task = replace(task, key=digest_json({"kind": "begun", "task": task.key, "rows": known}))
    write_commit(job.cache, task, shard, rejects, provenance(device, time.monotonic() - begun), stop=stop)


def ticked(rows: Iterable[Row], tick: Tick) -> Iterator[Row]:
    """The rows, each counted once the next one is asked for."""
    for row in rows:
        yield row
        tick(1)
