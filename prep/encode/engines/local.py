"""Runs tasks in this process: threads decode pictures while the device encodes the ones before.

A task becomes one shard and one commit, or, when it is interrupted, nothing. Batches never span tasks. Masks come first
(no model), then text, then latents, so that text encoder and VAE are never in memory together.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from prep.arrays import Finding, Reject, Task
from prep.cache.ledger.ledger import commit, is_finished
from prep.cache.shard_format import Shard
from prep.cache.writer import ShardWriter
from prep.digest import digest_bytes, digest_json
from prep.encode.engines.job import Job, Outcome, Tick, provenance
from prep.encode.targets import PictureWork
from prep.errors import CacheError
from prep.fs.blob import code_of, read_blob
from prep.images import decode as images
from prep.images.formats.sniff import BadPicture, NoDecoder
from prep.masks.methods import fits_scaled
from prep.runtime import held_back

A = TypeVar("A")
Row = Mapping[str, np.ndarray[Any, Any]]  # array name → one row, bfloat16 as uint16
Made = Row | Reject | Finding  # a row; one that can never be made; one that cannot be made now
NOT_FINITE = "not-finite"
TEXT_BATCH = 16  # captions per forward pass of the text encoder


def run(job: Job, tick: Tick) -> Outcome:
    """Runs every task of `job`, calling `tick` for each row. Raises `ModelError`, and `CacheError` past max_rejects."""
    tally = _Tally(job)
    by_field: dict[str, list[Task]] = {"mask": [], "text": [], "latent": []}
    for task in job.tasks:
        by_field[task.field].append(task)
    with ThreadPoolExecutor(job.jobs, thread_name_prefix="decode") as pool:
        try:
            for task, rows in _mask_rows(job, by_field["mask"], pool):
                _finish(job, task, rows, tally, tick, "cpu")
            _encode_texts(job, by_field["text"], tally, tick)
            _encode_latents(job, by_field["latent"], pool, tally, tick)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return Outcome(encoded=dict(tally.encoded), transient=tuple(tally.transient))


class _Tally:
    """What was made and refused so far."""

    def __init__(self, job: Job) -> None:
        self.encoded: Counter[str] = Counter()
        self.transient: list[Finding] = []
        self.limit = job.max_rejects
        self.refused = 0

    def refuse(self, what: Reject | Finding) -> None:
        """Counts a row that failed, but not one whose picture is bad: that is the picture's fault, and not the run's.

        Raises `CacheError` when there are too many.
        """
        self.refused += isinstance(what, Finding) or what.code == NOT_FINITE
        if isinstance(what, Finding):
            self.transient.append(what)
        if self.refused > self.limit:
            raise CacheError(f"{self.refused} rows could not be encoded, more than --max-rejects {self.limit}; "
                             f"the last: {what.detail}", hint="prep scan SOURCE names the pictures at fault")


def _encode_texts(job: Job, tasks: Sequence[Task], tally: _Tally, tick: Tick) -> None:
    if not tasks:
        return
    with held_back():
        from prep.models.quiet import quiet_libraries  # here: a run with nothing to encode imports no torch

        quiet_libraries()
        from prep.models.text_encoder import TextEncoder

    encoder = TextEncoder(job.model, device=job.device, compute=job.compute, dtype=job.specs.dtype)
    for task in _unfinished(job, tasks):
        _finish(job, task, _text_rows(job, task, encoder), tally, tick, job.device)


def _text_rows(job: Job, task: Task, encoder: Any) -> Iterator[tuple[str, Made]]:
    for keys in _chunks(task.rows, TEXT_BATCH):
        works = [job.wants.texts[key] for key in keys]
        plain = [work for work in works if work.caption is not None]
        rows = dict(zip((work.key for work in plain), encoder.encode([work.caption for work in plain]) if plain else (),
                        strict=True))
        for work in works:
            row = encoder.unconditional() if work.caption is None else rows[work.key]
            yield work.key, row if row is not None else _non_finite(work.key, "text row")


def _encode_latents(job: Job, tasks: Sequence[Task], pool: ThreadPoolExecutor, tally: _Tally, tick: Tick) -> None:
    if not tasks:
        return
    with held_back():
        from prep.models.quiet import quiet_libraries  # here: as above

        quiet_libraries()
        from prep.models.vae import VaeEncoder

    encoder = VaeEncoder(job.model, device=job.device, compute=job.compute, dtype=job.specs.dtype)
    for task, pixels in _ahead(job, tasks, pool, lambda work: _pixels(job, work), job.wants.latents):
        _finish(job, task, _latent_rows(pixels, encoder, job.batch_size), tally, tick, job.device)


def _latent_rows(pixels: Iterable[tuple[str, Any]], encoder: Any, batch_size: int) -> Iterator[tuple[str, Made]]:
    """Rows in key order; the batches' cut depends on the task and the batch size alone."""
    for chunk in _chunks(pixels, batch_size):
        good = [(key, image) for key, image in chunk if isinstance(image, np.ndarray)]
        latents = encoder.encode(np.stack([image for _, image in good])) if good else []
        made = dict(zip((key for key, _ in good), latents, strict=True))
        for key, image in chunk:
            if key not in made:
                yield key, image
            else:
                yield key, {"latent": made[key]} if made[key] is not None else _non_finite(key, "latent")


def _mask_rows(job: Job, tasks: Sequence[Task], pool: ThreadPoolExecutor) -> Iterator[tuple[Task, Any]]:
    return _ahead(job, tasks, pool, lambda work: _mask(job, work), job.wants.masks)


def _pixels(job: Job, work: PictureWork) -> np.ndarray[Any, Any] | Reject | Finding:
    return _from_file(work, lambda data: images.place(images.decode(data, alpha=job.alpha), work.placement))


def _mask(job: Job, work: PictureWork) -> Made:
    read = images.alpha_of if job.origin == "alpha" else images.decode_mask

    def make(data: bytes) -> np.ndarray[Any, Any]:
        mask = read(data)
        if not fits_scaled(mask.size, work.placement.scaled):
            width, height = mask.size
            raise BadPicture("mask-size-mismatch", f"mask has {width}x{height} pixels, not its picture's shape")
        return images.place_mask(mask, work.placement, job.specs.family.factor)

    made = _from_file(work, make)
    return {"mask": made[None]} if isinstance(made, np.ndarray) else made


def _from_file(work: PictureWork, make: Callable[[bytes], Any]) -> np.ndarray[Any, Any] | Reject | Finding:
    """What `make` makes of the file's bytes, which must still be those that the key names."""
    try:
        data = read_blob(work.blob)
        if digest_bytes(data) != work.digest:
            return Finding(path=work.name, code="changed-meanwhile", severity="error",
                           detail=f"{work.file} changed while it was being encoded; run the command again")
        return make(data)  # type: ignore[no-any-return]
    except OSError as error:
        return Finding(path=work.name, code=code_of(error), severity="error",
                       detail=f"{work.file} cannot be read: {error.strerror or error}")
    except MemoryError:  # no fault of the picture's own: another machine, or the next run, may have enough
        return Finding(path=work.name, code="too-large", severity="error",
                       detail=f"{work.file} takes more memory than there is")
    except NoDecoder as error:  # nor is this
        return Finding(path=work.name, code=error.code, severity="error", detail=f"{work.file} {error.detail}")
    except BadPicture as error:
        return Reject(key=work.key, code=error.code, detail=error.detail)


def _non_finite(key: str, what: str) -> Reject:
    return Reject(key=key, code=NOT_FINITE, detail=f"the {what} has NaN or infinity, also when computed in float32")


def _ahead(job: Job, tasks: Sequence[Task], pool: ThreadPoolExecutor, make: Callable[[PictureWork], Any],
           works: Mapping[str, PictureWork]) -> Iterator[tuple[Task, Iterator[tuple[str, Any]]]]:
    """Each unfinished task with its (key, made) pairs in order; the pool works two batches ahead, across tasks."""
    for task, results in groupby(_in_order(job, tasks, pool, make, works), key=lambda result: result[0]):
        yield task, ((key, made) for _, key, made in results)


def _in_order(job: Job, tasks: Sequence[Task], pool: ThreadPoolExecutor, make: Callable[[PictureWork], Any],
              works: Mapping[str, PictureWork]) -> Iterator[tuple[Task, str, Any]]:
    rows = ((task, key) for task in _unfinished(job, tasks) for key in task.rows)
    window: deque[tuple[Task, str, Future[Any]]] = deque()
    for task, key in rows:
        window.append((task, key, pool.submit(make, works[key])))
        if len(window) >= 2 * job.batch_size + job.jobs:
            first, name, future = window.popleft()
            yield first, name, future.result()
    for first, name, future in window:
        yield first, name, future.result()


def _unfinished(job: Job, tasks: Sequence[Task]) -> Iterator[Task]:
    """Those that no other process has finished by the time they are reached.

    Whoever follows the same plan begins somewhere else, and goes somewhere else when it meets what another has done:
    what comes after that is what the other is at.
    """
    left = deque(tasks)
    left.rotate(-start_at(left))
    while left:
        task = left.popleft()
        if is_finished(job.cache, task.key):
            left.rotate(-start_at(left))
        else:
            yield task


def start_at(tasks: Sequence[Task]) -> int:
    """Where to begin among `tasks`: anywhere, and it decides no byte of the result."""
    return secrets.randbelow(len(tasks)) if tasks else 0


def _finish(job: Job, task: Task, rows: Iterable[tuple[str, Made]], tally: _Tally, tick: Tick, device: str) -> None:
    """Writes a task's shard and then its commit; nothing of it remains when this is interrupted."""
    begun, failed = time.monotonic(), len(tally.transient)
    rejects: list[Reject] = []
    made_keys: list[str] = []
    with ShardWriter(job.cache, task.field, job.specs.of(task.field, job.bucket_of(task))) as writer:
        for key, made in rows:
            if isinstance(made, Reject | Finding):
                tally.refuse(made)
                rejects += [made] if isinstance(made, Reject) else []
            else:
                writer.add(key, made)
                made_keys.append(key)
            tick(1)
        shard: Shard | None = writer.finish() if writer.rows else None
    tally.encoded[task.field] += 0 if shard is None else shard.rows
    if len(tally.transient) > failed:  # the task is not finished; what is known of it is committed as a task of its own
        known = sorted([*made_keys, *(reject.key for reject in rejects)])
        if not known:
            return
        task = replace(task, key=digest_json({"kind": "begun", "task": task.key, "rows": known}))
    commit(job.cache, task, shard, rejects, provenance(device, time.monotonic() - begun))


def _chunks(rows: Iterable[A], size: int) -> Iterator[list[A]]:
    chunk: list[A] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
