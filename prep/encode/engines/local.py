"""Runs tasks on one device, in this process: workers decode pictures while the device encodes earlier ones.

A thread of its own writes (`writing.py`). A task becomes one shard and one commit, or nothing if interrupted. Batches
never span tasks. Masks come first (no model), then embeddings, text and latents, so that no two encoders are in memory
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from prep.cache.ledger.ledger import is_finished
from prep.cache.records import Task
from prep.encode.engines.commit import Tally, commit_task, ticked
from prep.encode.engines.job import Job, Outcome, PictureJob
from prep.encode.engines.order import from_random_start, made_ahead, tasks_left, unfinished, with_next
from prep.encode.engines.rows import (
    by_kind,
    embedded_pixels,
    imported_row,
    mask_row,
    picture_pixels,
    picture_rows,
    text_batches,
    text_rows,
)
from prep.encode.engines.tools import Tools
from prep.encode.engines.writing import WritingThread
from prep.encode.options import EMBED_BATCH
from prep.encode.targets.records import Made
from prep.errors import ModelError
from prep.models.family import TOKEN
from prep.models.vision.model import VisionModel
from prep.progress import Progress, Tick, phase, silent
from prep.runtime import defer_interrupts

# In encoding order, with their names for people.
FIELDS = {"mask": "masks", "embedding": "embeddings", "text": "text", "latent": "latents"}


def run(job: PictureJob, progress: Progress = silent, tools: Tools | None = None) -> Outcome:
    """Runs every task of `job`. Raises `ModelError`, and `CacheError` past max_rejects.

    `tools` are kept for the next job with the same settings; without, they are this job's own. Each field has its own
    progress bar: a latent takes a hundred times as long as a text row, so a common rate could not predict the remaining
    time.
    """
    tally = Tally(job)
    by_field: dict[str, list[Task]] = {field: [] for field in FIELDS}
    for task in job.tasks:
        by_field[task.field].append(task)
    with WritingThread[tuple[str, Made]]() as writing, \
            Tools(job.jobs) if tools is None else nullcontext(tools) as used:
        sink = _Sink(job, tally, writing)
        _encode_masks(job, by_field["mask"], used, sink, progress)
        _embed(job, by_field["embedding"], used, sink, progress)
        if isinstance(job, Job):
            _encode_texts(job, by_field["text"], used, sink, progress)
            _encode_latents(job, by_field["latent"], used, sink, progress)
    return Outcome(encoded=dict(tally.encoded), transient=tuple(tally.transient), notices=tuple(tally.notices),
                   failed=tally.failed)


@dataclass(frozen=True, slots=True)
class _Sink:
    """Where rows go: through a thread to the cache, counted."""

    job: PictureJob
    tally: Tally
    writing: WritingThread[tuple[str, Made]]

    def take(self, task: Task, rows: Iterable[tuple[str, Made]], tick: Tick, device: str) -> None:
        """Makes the rows of a task on `device`; the thread writes them."""
        self.writing.write(lambda made: commit_task(self.job, task, made, self.tally, device,
                                                    self.writing.abandoned), ticked(rows, tick))


def bar_of(job: PictureJob, field: str, progress: Progress) -> AbstractContextManager[Tick]:
    """The progress bar of a field's rows; its title numbers the field."""
    fields = [name for name in FIELDS if any(task.field == name for task in job.tasks)]
    rows = sum(len(task.rows) for task in job.tasks if task.field == field)
    which = f" ({fields.index(field) + 1} of {len(fields)})" if len(fields) > 1 else ""
    verb = "importing" if field == "latent" and isinstance(job, Job) and job.latents is not None else "encoding"
    return progress(f"{verb} {FIELDS[field]}{which}", rows, "rows")


def _encode_masks(job: PictureJob, tasks: Sequence[Task], tools: Tools, sink: _Sink,
                  progress: Progress) -> None:
    tasks_here = tasks_left(job, tasks)
    if tasks_here is None:
        return
    with bar_of(job, "mask", progress) as tick:
        for task, rows in made_ahead(job, tasks_here, tools, mask_row, job.targets.masks):
            sink.take(task, rows, tick, "cpu")


def _embed(job: PictureJob, tasks: Sequence[Task], tools: Tools, sink: _Sink, progress: Progress) -> None:
    tasks_here = tasks_left(job, tasks)
    if tasks_here is None:
        return
    vision = job.vision
    assert vision is not None, "a job with embeddings says what makes them"
    with phase(progress, "loading the vision model"):
        encoder = tools.encoder("embedding", lambda: vision_encoder(vision, job.device, tools))
    with bar_of(job, "embedding", progress) as tick:
        ahead = replace(job, batch_size=EMBED_BATCH)
        for task, pixels in made_ahead(ahead, tasks_here, tools, embedded_pixels, job.targets.embeddings):
            sink.take(task, picture_rows(pixels, encoder, EMBED_BATCH, "embedding"), tick, job.device)
    sink.tally.note_batches(encoder.batches, "pictures", "")


def vision_encoder(vision: VisionModel, device: str, tools: Tools) -> Any:
    """The vision model, loaded; its memory is let go with `tools`. Raises `ModelError`, `OutOfMemoryError`."""
    with defer_interrupts():
        from prep.models.device.memory import memory_freed  # here: as below
        from prep.models.vision.encoder import VisionEncoder

    encoder = VisionEncoder(vision, device=device)
    tools.hold(memory_freed(encoder.batches.device))
    return encoder


def _encode_texts(job: Job, tasks: Sequence[Task], tools: Tools, sink: _Sink, progress: Progress) -> None:
    ordered = from_random_start(tasks)
    turns = with_next(job, unfinished(job, ordered), ordered)
    first = next(turns, None)
    if first is None:
        return
    with phase(progress, "loading the text encoder"):
        encoder = tools.encoder("text", lambda: _text_encoder(job, first[1], tools))
    _check_text_shapes(job, encoder.shapes)
    with bar_of(job, "text", progress) as tick:
        for task, coming in chain([first], turns):
            if job.claims.stopped:
                break
            encoder.prepare(_captions(job, coming))
            sink.take(task, text_rows(job, task, encoder, tools), tick, job.device)
    sink.tally.notices += [*encoder.placement.notices, *encoder.compiler.notices]
    sink.tally.note_batches(encoder.batches, "captions", "")


def _text_encoder(job: Job, first: Iterable[Task], tools: Tools) -> Any:
    with defer_interrupts():
        from prep.models.loading import quiet_libraries  # here: a run with nothing to encode imports no torch

        quiet_libraries()
        from prep.models.device.memory import memory_freed
        from prep.models.text.encoder import TextEncoder

    encoder = TextEncoder(job.model, job.specs.family, job.text_options, device=job.device, dtype=job.specs.dtype,
                          compute=job.compute["text"], expected=job.text, memory=job.encoder_memory,
                          compiled=job.compiled, first=_captions(job, first))
    tools.hold(memory_freed(encoder.batches.device))
    return encoder


def _check_text_shapes(job: Job, made: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ModelError` unless the encoder makes the arrays that its configs promise."""
    for name, dims in job.specs.family.text.arrays.items():
        trimmed = job.specs.family.text.layout == "trimmed"
        for dim, seen, wanted in zip(dims, made[name], job.specs.text[name], strict=True):
            if seen != wanted and not (trimmed and dim == TOKEN and seen <= wanted):
                raise ModelError(f"the text encoder of {job.model} makes '{name}' of shape {made[name]} "
                                 f"({', '.join(dims)}), expected {job.specs.text[name]}",
                                 hint="check model_max_length in its tokenizer_config.json")


def _captions(job: Job, tasks: Iterable[Task]) -> Iterator[tuple[list[str], bool]]:
    """The captions of unfinished tasks, in the batches in which they will be encoded."""
    pending = (task for task in tasks if not is_finished(job.cache, task.key))
    return ((captions, negative) for task in pending for targets in text_batches(job, task)
            for _, captions, negative in by_kind(targets))


def _encode_latents(job: Job, tasks: Sequence[Task], tools: Tools, sink: _Sink,
                    progress: Progress) -> None:
    tasks_here = tasks_left(job, tasks)
    if tasks_here is None:
        return
    if job.latents is not None:
        with bar_of(job, "latent", progress) as tick:
            for task, rows in made_ahead(job, tasks_here, tools, imported_row, job.targets.latents):
                sink.take(task, rows, tick, "cpu")
        return
    with phase(progress, "loading the VAE"):
        size = pictures_at_once(job, tasks)
        encoder = tools.encoder("latent", lambda: _vae_encoder(job, tools))
    with bar_of(job, "latent", progress) as tick:
        for task, pixels in made_ahead(job, tasks_here, tools, picture_pixels, job.targets.latents):
            sink.take(task, picture_rows(pixels, encoder, size), tick, job.device)
    sink.tally.notices += encoder.compiler.notices
    sink.tally.note_batches(encoder.batches, "pictures", f"; --batch-size {encoder.batches.size} avoids the attempts")


def pictures_at_once(job: Job, tasks: Sequence[Task]) -> int:
    """How many pictures of these tasks the VAE encodes at a time. Raises `OutOfMemoryError`, `ModelError`."""
    with defer_interrupts():
        from prep.models.device.peaks import at_once  # here: as below

    sizes = [bucket for task in tasks if (bucket := job.bucket_of(task)) is not None]
    largest = max(sizes, key=lambda size: size[0] * size[1])
    return at_once(job.model, job.compute["latent"], largest, job.tile, job.device, wanted=job.batch_size,
                   fewer=job.fewer)


def _vae_encoder(job: Job, tools: Tools) -> Any:
    with defer_interrupts():
        from prep.models.loading import quiet_libraries  # here: as above

        quiet_libraries()
        from prep.models.device.allocator import settled_heap
        from prep.models.vae import VaeEncoder

    encoder = VaeEncoder(job.model, device=job.device, compute=job.compute["latent"], dtype=job.specs.dtype,
                         with_std=job.specs.with_std, tile=job.tile, expected=job.vae, compiled=job.compiled)
    tools.hold(settled_heap(encoder.batches.device))
    return encoder
