"""Encodes a few rows in memory to estimate how long a whole run takes, and how much memory; it writes nothing.

Latents are measured on a batch of the largest bucket, and take time in proportion to their pixels. Time to write shards
is not counted: encoders are slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prep.cache.records import Task
from prep.encode.engines.job import Job
from prep.encode.engines.local import FIELDS, pictures_at_once, vision_encoder
from prep.encode.engines.rows import (
    by_kind,
    embedded_pixels,
    mask_row,
    picture_pixels,
    picture_rows,
    text_batches,
    text_rows,
)
from prep.encode.engines.tools import Tools
from prep.encode.forecast.estimate import Measured
from prep.encode.options import EMBED_BATCH
from prep.geometry import Size
from prep.models.loading import quiet_libraries
from prep.progress import Progress, phase

TEXTS, MASKS = 32, 8  # rows to encode; pictures: a batch


def measure(job: Job, progress: Progress) -> Measured:
    """Runs the encoders on some rows of `job`. Raises `ModelError`, `OutOfMemoryError`."""
    with Tools(job.jobs) as tools:
        return _measured(job, tools, progress)


def _measured(job: Job, tools: Tools, progress: Progress) -> Measured:
    by_field: dict[str, list[Task]] = {field: [task for task in job.tasks if task.field == field]
                                       for field in FIELDS}
    quiet_libraries()
    from prep.models.device.memory import memory_freed, peak_memory  # here: without --measure no torch is imported
    from prep.models.tensors import pick_device

    seconds, loading, rows = 0.0, 0.0, {}
    for field, run in (("mask", _masks), ("embedding", _embeddings), ("text", _texts), ("latent", _latents)):
        if by_field[field]:
            with phase(progress, f"measuring {field}"), memory_freed(pick_device(job.device)):
                loaded, took, rows[field] = run(job, by_field[field], tools)
            seconds, loading = seconds + loaded + took, loading + loaded
    return Measured(seconds=seconds, loading=loading, memory=peak_memory(job.device), rows=rows)


Took = tuple[float, float, int]  # seconds to load the encoders, and those of all rows; rows that were encoded


def _masks(job: Job, tasks: list[Task], tools: Tools) -> Took:
    keys = [key for task in tasks for key in task.rows]
    took, made = _timed(lambda: [mask_row(job, job.targets.masks[key], tools.workers) for key in keys[:MASKS]])
    return 0.0, took / len(made) * len(keys) / job.jobs, len(made)


def _embeddings(job: Job, tasks: list[Task], tools: Tools) -> Took:
    assert job.vision is not None, "a job with embeddings says what makes them"
    keys, begun = [key for task in tasks for key in task.rows], time.monotonic()
    encoder = vision_encoder(job.vision, job.device, tools)
    loading, some = time.monotonic() - begun, keys[:EMBED_BATCH]
    decoding, pixels = _timed(lambda: [(key, embedded_pixels(job, job.targets.embeddings[key], tools.workers))
                                       for key in some])
    encoding, _ = _timed(lambda: list(picture_rows(iter(pixels), encoder, EMBED_BATCH, "embedding")))
    return loading, max(decoding / job.jobs, encoding) / len(some) * len(keys), len(some)


def _texts(job: Job, tasks: list[Task], tools: Tools) -> Took:
    from prep.models.text.encoder import TextEncoder

    task = max(tasks, key=lambda each: (job.tokens_of(each) or 0, len(each.rows)))
    task = replace(task, rows=task.rows[:TEXTS])
    batches = [(captions, negative) for targets in text_batches(job, task)
               for _, captions, negative in by_kind(targets)]
    begun = time.monotonic()
    encoder = TextEncoder(job.model, job.specs.family, job.text_options, device=job.device, dtype=job.specs.dtype,
                          compute=job.compute["text"], expected=job.text, memory=job.encoder_memory,
                          compiled=job.compiled, first=batches)
    count = len(list(text_rows(job, task, encoder, tools)))
    took = time.monotonic() - begun - encoder.loading  # not every caption takes the time to load
    return encoder.loading, took / count * sum(len(each.rows) for each in tasks), count


def _latents(job: Job, tasks: list[Task], tools: Tools) -> Took:
    from prep.models.vae import VaeEncoder

    def area(task: Task) -> int:
        bucket: Size | None = job.bucket_of(task)
        assert bucket is not None, "a latent has a bucket"
        return bucket[0] * bucket[1]

    largest = max(tasks, key=lambda task: (area(task), len(task.rows)))
    begun = time.monotonic()
    encoder = VaeEncoder(job.model, device=job.device, compute=job.compute["latent"], dtype=job.specs.dtype,
                         with_std=job.specs.with_std, tile=job.tile, expected=job.vae, compiled=job.compiled)
    loading = time.monotonic() - begun
    size = pictures_at_once(job, tasks)
    keys = largest.rows[:size]
    decoding, pixels = _timed(lambda: [(key, picture_pixels(job, job.targets.latents[key], tools.workers))
                                       for key in keys])
    encoding, _ = _timed(lambda: list(picture_rows(iter(pixels), encoder, size)))
    each = max(decoding / job.jobs, encoding) / len(keys)  # threads decode meanwhile
    return loading, each * sum(area(task) * len(task.rows) for task in tasks) / area(largest), len(keys)


def _timed(work: Callable[[], list[Any]]) -> tuple[float, list[Any]]:
    begun = time.monotonic()
    made = work()
    return time.monotonic() - begun, made
