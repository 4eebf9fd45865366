"""Runs tasks on one device, in this process: workers decode pictures while the device encodes earlier ones.

A thread of its own writes (`writing.py`). A task becomes one shard and one commit, or nothing if interrupted. Batches
never span tasks. Masks come first (no model), then text, then latents, so that text encoder and VAE are never in memory
together.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from typing import Any, TypeVar

from prep.cache.ledger.ledger import is_done, is_finished, write_commit
from prep.cache.records import Reject, Shard, Task
from prep.cache.writer import ShardWriter
from prep.digest import digest_json
from prep.encode.engines.job import Job, Outcome, provenance
from prep.encode.engines.rows import (
    NOT_FINITE,
    by_kind,
    imported_row,
    latent_rows,
    mask_row,
    picture_pixels,
    text_batches,
    text_rows,
)
from prep.encode.engines.tools import FETCHERS, Tools
from prep.encode.engines.writing import WritingThread
from prep.encode.targets import Made, PictureTarget
from prep.errors import CacheError, ModelError
from prep.findings import Finding
from prep.formatting import counted
from prep.fs.blob import waits
from prep.models.family import TOKEN
from prep.progress import Progress, Tick, phase, silent
from prep.runtime import defer_interrupts
from prep.workers.pool import WorkerPool

FIELDS = {"mask": "masks", "text": "text", "latent": "latents"}  # in encoding order, with their names for people
TAKEN = 8  # tasks of text that a process takes at once, if there are several
Row = TypeVar("Row")
Make = Callable[[Job, PictureTarget, WorkerPool], Any]


def run(job: Job, progress: Progress = silent, tools: Tools | None = None) -> Outcome:
    """Runs every task of `job`. Raises `ModelError`, and `CacheError` past max_rejects.

    `tools` are kept for the next job with the same settings; without, they are this job's own. Each field has its own
    progress bar: a latent takes a hundred times as long as a text row, so a common rate could not predict the remaining
    time.
    """
    tally = _Tally(job)
    by_field: dict[str, list[Task]] = {"mask": [], "text": [], "latent": []}
    for task in job.tasks:
        by_field[task.field].append(task)
    with WritingThread[tuple[str, Made]]() as writing, \
            Tools(job.jobs) if tools is None else nullcontext(tools) as used:
        sink = _Sink(job, tally, writing)
        _encode_masks(job, by_field["mask"], used, sink, progress)
        _encode_texts(job, by_field["text"], used, sink, progress)
        _encode_latents(job, by_field["latent"], used, sink, progress)
    return Outcome(encoded=dict(tally.encoded), transient=tuple(tally.transient), notices=tuple(tally.notices),
                   failed=tally.failed)


class _Tally:
    """Counts encoded rows and failed rows."""

    def __init__(self, job: Job) -> None:
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


@dataclass(frozen=True, slots=True)
class _Sink:
    """Where rows go: through a thread to the cache, counted."""

    job: Job
    tally: _Tally
    writing: WritingThread[tuple[str, Made]]

    def take(self, task: Task, rows: Iterable[tuple[str, Made]], tick: Tick, device: str) -> None:
        """Makes the rows of a task on `device`; the thread writes them."""
        self.writing.write(lambda made: _finish(self.job, task, made, self.tally, device,
                                                self.writing.abandoned), ticked(rows, tick))


def bar_of(job: Job, field: str, progress: Progress) -> AbstractContextManager[Tick]:
    """The progress bar of a field's rows; its title numbers the field."""
    fields = [name for name in FIELDS if any(task.field == name for task in job.tasks)]
    rows = sum(len(task.rows) for task in job.tasks if task.field == field)
    which = f" ({fields.index(field) + 1} of {len(fields)})" if len(fields) > 1 else ""
    verb = "importing" if field == "latent" and job.latents is not None else "encoding"
    return progress(f"{verb} {FIELDS[field]}{which}", rows, "rows")


def _encode_masks(job: Job, tasks: Sequence[Task], tools: Tools, sink: _Sink,
                  progress: Progress) -> None:
    left = _left(job, tasks)
    if left is None:
        return
    with bar_of(job, "mask", progress) as tick:
        for task, rows in _ahead(job, left, tools, mask_row, job.targets.masks):
            sink.take(task, rows, tick, "cpu")


def _encode_texts(job: Job, tasks: Sequence[Task], tools: Tools, sink: _Sink, progress: Progress) -> None:
    left = _from_somewhere(tasks)
    turns = _with_coming(job, _unfinished(job, left), left)
    first = next(turns, None)
    if first is None:
        return
    with phase(progress, "loading the text encoder"):
        encoder = tools.encoder("text", lambda: _text_encoder(job, first[1]))
    _check_text_shapes(job, encoder.shapes)
    with bar_of(job, "text", progress) as tick:
        for task, coming in chain([first], turns):
            if job.claims.stopped:
                break
            encoder.prepare(_captions(job, coming))
            sink.take(task, text_rows(job, task, encoder), tick, job.device)
    sink.tally.notices += [*encoder.placement.notices, *encoder.compiler.notices]
    sink.tally.note_batches(encoder.batches, "captions", "")


def _text_encoder(job: Job, first: Iterable[Task]) -> Any:
    with defer_interrupts():
        from prep.models.loading import quiet_libraries  # here: a run with nothing to encode imports no torch

        quiet_libraries()
        from prep.models.text.encoder import TextEncoder

    return TextEncoder(job.model, job.specs.family, job.text_options, device=job.device, dtype=job.specs.dtype,
                       compute=job.compute["text"], expected=job.text, memory=job.encoder_memory,
                       compiled=job.compiled, first=_captions(job, first))


def _check_text_shapes(job: Job, made: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ModelError` unless the encoder makes the arrays that its configs promise."""
    for name, dims in job.specs.family.text.arrays.items():
        trimmed = job.specs.family.text.layout == "trimmed"
        for dim, seen, wanted in zip(dims, made[name], job.specs.text[name], strict=True):
            if seen != wanted and not (trimmed and dim == TOKEN and seen <= wanted):
                raise ModelError(f"the text encoder of {job.model} makes '{name}' of shape {made[name]} "
                                 f"({', '.join(dims)}), expected {job.specs.text[name]}",
                                 hint="check model_max_length in its tokenizer_config.json")


def _encode_latents(job: Job, tasks: Sequence[Task], tools: Tools, sink: _Sink,
                    progress: Progress) -> None:
    left = _left(job, tasks)
    if left is None:
        return
    if job.latents is not None:
        with bar_of(job, "latent", progress) as tick:
            for task, rows in _ahead(job, left, tools, imported_row, job.targets.latents):
                sink.take(task, rows, tick, "cpu")
        return
    with phase(progress, "loading the VAE"):
        encoder = tools.encoder("latent", lambda: _vae_encoder(job, tools))
    with bar_of(job, "latent", progress) as tick:
        for task, pixels in _ahead(job, left, tools, picture_pixels, job.targets.latents):
            sink.take(task, latent_rows(pixels, encoder, job.batch_size), tick, job.device)
    sink.tally.notices += encoder.compiler.notices
    sink.tally.note_batches(encoder.batches, "pictures", f"; --batch-size {encoder.batches.size} avoids the attempts")


def _vae_encoder(job: Job, tools: Tools) -> Any:
    with defer_interrupts():
        from prep.models.loading import quiet_libraries  # here: as above

        quiet_libraries()
        from prep.models.device.allocator import kept_heap
        from prep.models.vae import VaeEncoder

    encoder = VaeEncoder(job.model, device=job.device, compute=job.compute["latent"], dtype=job.specs.dtype,
                         with_std=job.specs.with_std, tile=job.tile, expected=job.vae, compiled=job.compiled)
    tools.hold(kept_heap(encoder.batches.device))
    return encoder


def _ahead(job: Job, tasks: Iterable[Task], tools: Tools, make: Make,
           works: Mapping[str, PictureTarget]) -> Iterator[tuple[Task, Iterator[tuple[str, Any]]]]:
    """Each task with its (key, made) pairs in order; the pool works two batches ahead, across tasks."""
    for task, results in groupby(_in_order(job, tasks, tools, make, works), key=lambda result: result[0]):
        if job.claims.stopped:
            return
        yield task, ((key, made) for _, key, made in results)


def _in_order(job: Job, tasks: Iterable[Task], tools: Tools, make: Make,
              works: Mapping[str, PictureTarget]) -> Iterator[tuple[Task, str, Any]]:
    rows = ((task, key) for task in tasks for key in task.rows)
    window: deque[tuple[Task, str, Future[Any]]] = deque()
    for task, key in rows:
        window.append((task, key, tools.pool.submit(make, job, works[key], tools.workers)))
        if len(window) >= 2 * job.batch_size + job.jobs + (FETCHERS if waits(works[key].blob) else 0):
            first, name, future = window.popleft()
            yield first, name, future.result()
    for first, name, future in window:
        yield first, name, future.result()


def _left(job: Job, tasks: Sequence[Task]) -> Iterator[Task] | None:
    """The tasks that are left for this process; `None` if there are none, so that no model is loaded for them."""
    found = _unfinished(job, _from_somewhere(tasks))
    first = next(found, None)
    return None if first is None else chain([first], found)


def _with_coming(job: Job, ours: Iterator[Task], left: Iterable[Task]) -> Iterator[tuple[Task, list[Task]]]:
    """Each task, with itself and those that this process will probably encode after it.

    Processes of one run take several tasks at once, because each must load every text encoder for what it takes.
    """
    while block := list(islice(ours, TAKEN if job.claims.shared else 1)):
        for number, task in enumerate(block):
            yield task, [*block[number:], *(() if job.claims.shared else left)]


def _captions(job: Job, tasks: Iterable[Task]) -> Iterator[tuple[list[str], bool]]:
    """The captions of unfinished tasks, in the batches in which they will be encoded."""
    unfinished = (task for task in tasks if not is_finished(job.cache, task.key))
    return ((captions, negative) for task in unfinished for works in text_batches(job, task)
            for _, captions, negative in by_kind(works))


def _from_somewhere(tasks: Sequence[Task]) -> deque[Task]:
    """The tasks, from a random one on, so that processes that follow the same plan start at different places."""
    left = deque(tasks)
    left.rotate(-start_at(left))
    return left


def _unfinished(job: Job, left: deque[Task]) -> Iterator[Task]:
    """Takes from `left` the tasks that no other process has finished by the time they are reached, nor one of this run
    has taken.

    When it reaches a finished task it jumps to a random place, since another process is probably working on the tasks
    that follow.
    """
    while left:
        task = left.popleft()
        if not job.claims.take(task.key):
            continue
        if is_done(job.cache, task.key):
            left.rotate(-start_at(left))
        else:
            yield task


def start_at(tasks: Sequence[Task]) -> int:
    """A random index of `tasks` to start at; it affects no byte of the result."""
    return secrets.randbelow(len(tasks)) if tasks else 0


def ticked(rows: Iterable[Row], tick: Tick) -> Iterator[Row]:
    """The rows, each counted once the next one is asked for."""
    for row in rows:
        yield row
        tick(1)


def _finish(job: Job, task: Task, rows: Iterable[tuple[str, Made]], tally: _Tally, device: str,
            stop: threading.Event) -> None:
    """Writes a task's shard and then its commit; an interruption while rows are made leaves nothing."""
    begun, failed = time.monotonic(), len(tally.transient)
    rejects: list[Reject] = []
    made_keys: list[str] = []
    specs = job.specs.arrays_of(task.field, job.bucket_of(task), job.tokens_of(task))
    with ShardWriter(job.cache, task.field, specs) as writer:
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
