"""Makes one task's rows: texts, latents and masks as arrays, or the reason why a row cannot be made."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from prep.cache.records import Reject, Task
from prep.encode.engines.decoding import DECODE, LIMITS
from prep.encode.engines.job import Job, PictureJob
from prep.encode.engines.protocol import PictureMessage, PixelsMessage, Reading
from prep.encode.engines.tools import Tools
from prep.encode.options import TEXT_BATCH
from prep.encode.targets.records import Made, PictureTarget, TextTarget
from prep.findings import Finding
from prep.fs.blob import error_code
from prep.images.resize import scaled_pixels
from prep.parse import Unparsed, alpha_of, alpha_setting, color_below
from prep.workers.pool import WorkerLost, WorkerPool

A = TypeVar("A")
Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
NOT_FINITE = "not-finite"


def text_rows(job: Job, task: Task, encoder: Any, tools: Tools) -> Iterator[tuple[str, Made]]:
    """The (key, arrays) of a text task's rows, in order; a `Reject` for one that is not finite.

    Pictures that the text encoder sees are decoded while it encodes earlier rows of the batch.
    """
    tokens = job.tokens_of(task)
    for targets in text_batches(job, task):
        pictures = {target.key: [tools.pool.submit(seen_pixels, job, picture, tools.workers)
                                 for picture in target.pictures] for target in targets if target.pictures}
        rows: dict[str, Any] = {}
        for keys, captions, negative in by_kind(targets):
            rows |= dict(zip(keys, encoder.encode(captions, tokens, negative=negative), strict=True))
        for target in targets:
            if target.key in pictures:
                seen = [future.result() for future in pictures.pop(target.key)]
                if bad := next((each for each in seen if not isinstance(each, np.ndarray)), None):
                    yield target.key, bad
                    continue
                row = encoder.encode_seen(target.caption, seen, tokens)
            else:
                row = encoder.unconditional(tokens) if target.caption is None else rows[target.key]
            yield target.key, row if row is not None else non_finite(target.key, "text row")


def text_batches(job: Job, task: Task) -> Iterator[list[TextTarget]]:
    """The rows of a text task, as many at a time as the text encoder gets."""
    return ([job.targets.texts[key] for key in keys] for keys in chunks(task.rows, TEXT_BATCH))


def by_kind(targets: Iterable[TextTarget]) -> Iterator[tuple[list[str], list[str], bool]]:
    """Keys and captions of a batch that are encoded together, and whether they are negative prompts."""
    for negative in (False, True):
        texts = {target.key: target.caption for target in targets
                 if target.caption is not None and target.negative == negative and not target.pictures}
        if texts:
            yield list(texts), list(texts.values()), negative


def picture_rows(pixels: Iterable[tuple[str, Any]], encoder: Any, batch_size: int, what: str = "latent"
                 ) -> Iterator[tuple[str, Made]]:
    """Rows in key order, each `what` of a picture; only the task and the batch size decide the batches.

    Before the rows of a batch are waited for, `encoder.ahead` more are begun.
    """
    begun: deque[Iterator[tuple[str, Made]]] = deque()
    for chunk in chunks(pixels, batch_size):
        begun.append(_begin(chunk, encoder, what))
        if len(begun) > encoder.ahead:
            yield from begun.popleft()
    for rows in begun:
        yield from rows


def _begin(chunk: Sequence[tuple[str, Any]], encoder: Any, what: str) -> Iterator[tuple[str, Made]]:
    """Begins a batch: its rows, which are waited for when the first is asked for."""
    good = [(key, image) for key, image in chunk if isinstance(image, np.ndarray)]
    latents = encoder.begin(_together([image for _, image in good])) if good else list

    def rows() -> Iterator[tuple[str, Made]]:
        made = dict(zip((key for key, _ in good), latents(), strict=True))
        for key, image in chunk:
            if key not in made:
                yield key, image
            else:
                row = made[key]
                yield key, row if row is not None else non_finite(key, what)

    return rows()


def _together(images: Sequence[Pixels]) -> Pixels:
    """Pictures as a batch, with a fourth channel if one of them has a hole."""
    if len({image.shape[2] for image in images}) == 1:
        return np.stack(images)
    batch = np.full((len(images), *images[0].shape[:2], 4), 255, np.uint8)
    for image, pixels in zip(batch, images, strict=True):
        image[..., :pixels.shape[2]] = pixels
    return batch


def picture_pixels(job: PictureJob, target: PictureTarget, decoders: WorkerPool) -> Pixels | Reject | Finding:
    """The pixels that the VAE gets for a target, decoded by a worker; or why there are none. uint8 [H, W, 3]; with a
    hole [H, W, 4], the last channel 0 there and 255 elsewhere; where transparency is kept, that is opacity."""
    return _decoded(job, target, "picture", decoders)


def seen_pixels(job: PictureJob, target: PictureTarget, decoders: WorkerPool) -> Pixels | Reject | Finding:
    """The pixels, uint8 [H, W, 3], that the text encoder gets; or why there are none."""
    return picture_pixels(replace(job, alpha=alpha_setting(color_below(alpha_of(job.alpha)))), target, decoders)


def embedded_pixels(job: PictureJob, target: PictureTarget, decoders: WorkerPool) -> Pixels | Reject | Finding:
    """The pixels, uint8 [H, W, 3], that the vision model gets, not normalized; or why there are none."""
    pixels, vision = seen_pixels(job, target, decoders), job.vision
    assert vision is not None, "a job with embeddings says what makes them"
    if not isinstance(pixels, np.ndarray):
        return pixels
    how, (height, width) = vision.preparation, pixels.shape[:2]
    return scaled_pixels(pixels, how.scaled_size((width, height)), how.crop, how.resample)


def imported_row(job: PictureJob, target: PictureTarget, _decoders: WorkerPool) -> Made:
    """The arrays of a latent that another program made; or why there are none."""
    assert isinstance(job, Job), "only a model with a family has latents"
    assert job.latents is not None, "a job with imported latents says what makes them"
    return job.latents.row(target)


def mask_row(job: PictureJob, target: PictureTarget, decoders: WorkerPool) -> Made:
    """The mask (uint8 [M, h, w] of latent cells) of a target, decoded by a worker; or why there is none."""
    made = _decoded(job, target, target.mask_from, decoders)
    return {"mask": made} if isinstance(made, np.ndarray) else made


def _decoded(job: PictureJob, target: PictureTarget, reading: Reading, decoders: WorkerPool
             ) -> Pixels | Reject | Finding:
    """What a worker makes of the file; a worker that is lost costs a finding, and the next run tries again."""
    try:
        message = _message(job, target, reading, decoders.closed)
        (answer,) = decoders.ask(DECODE, message, LIMITS)
        if not answer.code:
            return answer.array(message.shape)
    except WorkerLost as lost:
        code, detail = lost.finding(LIMITS)
        answer = PixelsMessage(code=code, detail=detail)
    except OSError as error:  # of an object in a store; a worker opens files itself
        answer = PixelsMessage(code=error_code(error), detail=f"cannot be read: {error.strerror or error}")
    except (Unparsed, ValueError) as error:
        answer = PixelsMessage(code="decoder-crashed", detail=f"got an invalid answer from its decoder: {error}")
    if answer.bad:
        return Reject(key=target.key, code=answer.code, detail=answer.detail)
    return Finding(path=target.name, code=answer.code, severity="error", detail=f"{target.file} {answer.detail}")


def _message(job: PictureJob, target: PictureTarget, reading: Reading, stop: threading.Event) -> PictureMessage:
    """What a worker is asked for. Raises `OSError`, `StoreError`, `Stopped`."""
    (factor, cell), hole = job.cell, target.hole
    ask = partial(PictureMessage.of, placement=target.placement, color=job.alpha, factor=factor, stop=stop)
    cut = None if hole is None else ask(hole.mask_from, hole.blob, hole.digest, cell="whole")
    return ask(reading, target.blob, target.digest, cell=cell, hole=cut)


def non_finite(key: str, what: str) -> Reject:
    """The reject of a row with NaN or infinity."""
    return Reject(key=key, code=NOT_FINITE, detail=f"the {what} has NaN or infinity, even when computed in float32")


def chunks(rows: Iterable[A], size: int) -> Iterator[list[A]]:
    """The rows, `size` at a time; the last chunk may have fewer."""
    chunk: list[A] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
