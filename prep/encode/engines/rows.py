"""Makes one task's rows: texts, latents and masks as arrays, or the reason why a row cannot be made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from prep.cache.records import Reject, Task
from prep.digest import digest_bytes
from prep.encode.engines.job import Job
from prep.encode.targets import PictureTarget
from prep.findings import Finding
from prep.fs.blob import error_code, read_blob
from prep.geometry import fits_scaled
from prep.images.decode import decode_picture, scale_and_crop
from prep.images.formats.parts import BadPicture, NoDecoder
from prep.images.mask import alpha_of, decode_mask, place_mask

A = TypeVar("A")
EncodedRow = Mapping[str, np.ndarray[Any, Any]]  # array name → one row, bfloat16 as uint16
Made = EncodedRow | Reject | Finding  # a row; a permanent failure; a failure of this run
NOT_FINITE = "not-finite"
TEXT_BATCH = 16  # captions per forward pass of the text encoder


def text_rows(job: Job, task: Task, encoder: Any) -> Iterator[tuple[str, Made]]:
    tokens = job.tokens_of(task)
    for keys in chunks(task.rows, TEXT_BATCH):
        works = [job.wants.texts[key] for key in keys]
        rows: dict[str, Any] = {}
        for negative in (False, True):
            texts = {work.key: work.caption for work in works if work.caption is not None and work.negative == negative}
            if texts:
                rows |= dict(zip(texts, encoder.encode(list(texts.values()), tokens, negative=negative), strict=True))
        for work in works:
            row = encoder.unconditional(tokens) if work.caption is None else rows[work.key]
            yield work.key, row if row is not None else non_finite(work.key, "text row")


def latent_rows(pixels: Iterable[tuple[str, Any]], encoder: Any, batch_size: int) -> Iterator[tuple[str, Made]]:
    """Rows in key order; only the task and the batch size decide the batches."""
    for chunk in chunks(pixels, batch_size):
        good = [(key, image) for key, image in chunk if isinstance(image, np.ndarray)]
        latents = encoder.encode(np.stack([image for _, image in good])) if good else []
        made = dict(zip((key for key, _ in good), latents, strict=True))
        for key, image in chunk:
            if key not in made:
                yield key, image
            else:
                row = made[key]
                yield key, row if row is not None else non_finite(key, "latent")


def picture_pixels(job: Job, work: PictureTarget) -> np.ndarray[Any, Any] | Reject | Finding:
    return from_file(work, lambda data: scale_and_crop(decode_picture(data, alpha=job.alpha), work.placement))


def mask_row(job: Job, work: PictureTarget) -> Made:
    read = alpha_of if job.origin == "alpha" else decode_mask

    def make(data: bytes) -> np.ndarray[Any, Any]:
        mask = read(data)
        if not fits_scaled(mask.size, work.placement.scaled):
            width, height = mask.size
            raise BadPicture("mask-size-mismatch", f"mask has {width}x{height} pixels, not its picture's shape")
        return place_mask(mask, work.placement, job.specs.family.factor)

    made = from_file(work, make)
    return {"mask": made[None]} if isinstance(made, np.ndarray) else made


def from_file(work: PictureTarget, make: Callable[[bytes], Any]) -> np.ndarray[Any, Any] | Reject | Finding:
    """`make` of the file's bytes, if they still have the digest in the key; else the reason for failure."""
    try:
        data = read_blob(work.blob)
        if digest_bytes(data) != work.digest:
            return Finding(path=work.name, code="changed-meanwhile", severity="error",
                           detail=f"{work.file} changed while it was being encoded; run the command again")
        return make(data)  # type: ignore[no-any-return]
    except OSError as error:
        return Finding(path=work.name, code=error_code(error), severity="error",
                       detail=f"{work.file} cannot be read: {error.strerror or error}")
    except MemoryError:  # not the picture's fault: another machine, or the next run, may have enough
        return Finding(path=work.name, code="too-large", severity="error",
                       detail=f"{work.file} takes more memory than there is")
    except NoDecoder as error:  # not the picture's fault either
        return Finding(path=work.name, code=error.code, severity="error", detail=f"{work.file} {error.detail}")
    except BadPicture as error:
        return Reject(key=work.key, code=error.code, detail=error.detail)


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
