"""Makes one task's rows: texts, latents and masks as arrays, or the reason why a row cannot be made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from prep.cache.records import Reject, Task
from prep.encode.engines.decoding import DECODE, LIMITS
from prep.encode.engines.job import Job
from prep.encode.engines.protocol import PictureMessage, PixelsMessage, Reading
from prep.encode.targets import Made, PictureTarget, TextTarget
from prep.findings import Finding
from prep.fs.blob import error_code
from prep.parse import Unparsed
from prep.workers.pool import WorkerLost, WorkerPool

A = TypeVar("A")
Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
NOT_FINITE = "not-finite"
TEXT_BATCH = 16  # captions per forward pass of the text encoder


def text_rows(job: Job, task: Task, encoder: Any) -> Iterator[tuple[str, Made]]:
    tokens = job.tokens_of(task)
    for works in text_batches(job, task):
        rows: dict[str, Any] = {}
        for keys, captions, negative in by_kind(works):
            rows |= dict(zip(keys, encoder.encode(captions, tokens, negative=negative), strict=True))
        for work in works:
            row = encoder.unconditional(tokens) if work.caption is None else rows[work.key]
            yield work.key, row if row is not None else non_finite(work.key, "text row")


def text_batches(job: Job, task: Task) -> Iterator[list[TextTarget]]:
    """The rows of a text task, as many at a time as the text encoder gets."""
    return ([job.targets.texts[key] for key in keys] for keys in chunks(task.rows, TEXT_BATCH))


def by_kind(works: Iterable[TextTarget]) -> Iterator[tuple[list[str], list[str], bool]]:
    """Keys and captions of a batch that are encoded together, and whether they are negative prompts."""
    for negative in (False, True):
        texts = {work.key: work.caption for work in works if work.caption is not None and work.negative == negative}
        if texts:
            yield list(texts), list(texts.values()), negative


def latent_rows(pixels: Iterable[tuple[str, Any]], encoder: Any, batch_size: int) -> Iterator[tuple[str, Made]]:
    """Rows in key order; only the task and the batch size decide the batches.

    Before the rows of a batch are waited for, `encoder.ahead` more are begun.
    """
    begun: deque[Iterator[tuple[str, Made]]] = deque()
    for chunk in chunks(pixels, batch_size):
        begun.append(_begin(chunk, encoder))
        if len(begun) > encoder.ahead:
            yield from begun.popleft()
    for rows in begun:
        yield from rows


def _begin(chunk: Sequence[tuple[str, Any]], encoder: Any) -> Iterator[tuple[str, Made]]:
    """Begins a batch: its rows, which are waited for when the first is asked for."""
    good = [(key, image) for key, image in chunk if isinstance(image, np.ndarray)]
    latents = encoder.begin(np.stack([image for _, image in good])) if good else list

    def rows() -> Iterator[tuple[str, Made]]:
        made = dict(zip((key for key, _ in good), latents(), strict=True))
        for key, image in chunk:
            if key not in made:
                yield key, image
            else:
                row = made[key]
                yield key, row if row is not None else non_finite(key, "latent")

    return rows()


def picture_pixels(job: Job, work: PictureTarget, decoders: WorkerPool) -> Pixels | Reject | Finding:
    return _decoded(job, work, "picture", decoders)


def imported_row(job: Job, work: PictureTarget, _decoders: WorkerPool) -> Made:
    assert job.latents is not None, "a job with imported latents says what makes them"
    return job.latents.row(work)


def mask_row(job: Job, work: PictureTarget, decoders: WorkerPool) -> Made:
    made = _decoded(job, work, "alpha" if job.origin == "alpha" else "mask", decoders)
    return {"mask": made[None]} if isinstance(made, np.ndarray) else made


def _decoded(job: Job, work: PictureTarget, reading: Reading, decoders: WorkerPool) -> Pixels | Reject | Finding:
    """What a worker makes of the file; a worker that is lost costs a finding, and the next run tries again."""
    try:
        asked = PictureMessage.of(reading, work.blob, work.digest, work.placement, color=job.alpha,
                                  factor=job.specs.family.factor, stop=decoders.closed)
        (answer,) = decoders.ask(DECODE, asked, LIMITS)
        if not answer.code:
            return answer.array(asked.shape)
    except WorkerLost as lost:
        code, detail = lost.finding(LIMITS)
        answer = PixelsMessage(code=code, detail=detail)
    except OSError as error:  # of an object in a store; a worker opens files itself
        answer = PixelsMessage(code=error_code(error), detail=f"cannot be read: {error.strerror or error}")
    except (Unparsed, ValueError) as error:
        answer = PixelsMessage(code="decoder-crashed", detail=f"got an invalid answer from its decoder: {error}")
    if answer.bad:
        return Reject(key=work.key, code=answer.code, detail=answer.detail)
    return Finding(path=work.name, code=answer.code, severity="error", detail=f"{work.file} {answer.detail}")


def non_finite(key: str, what: str) -> Reject:
    return Reject(key=key, code=NOT_FINITE, detail=f"the {what} has NaN or infinity, even when computed in float32")


def chunks(rows: Iterable[A], size: int) -> Iterator[list[A]]:
    chunk: list[A] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
