"""Batches from the cache: rows read by one background thread straight into a ring of reused buffers, draws beside them.

A batch's buffers belong to the ring and are filled again after the loop asks for the next batch; on CUDA they are
pinned, and a batch is copied without waiting (an event keeps the thread from filling it too early). One thread makes
4000 samples a second with all their draws (the demo's rows, one core of a 2-core EPYC), so no workers and no fork.
B samples, C channels, h w latent cells, L tokens, D text channels.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prep.cache.reader import Reader
from prep.draw import philox
from prep.errors import CacheError
from prep.records import RowRef
from prep.report.words import safe
from train.device import move, record_copies
from train.draws import NO_TEXT, Request, Shot
from train.index import Index

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8,
}  # fmt: skip
SLOTS = 4  # batches that may be ready or in use at a time
AHEAD = 4  # batches whose rows the kernel is told of before they are read


class Slot:
    """One set of buffers of the ring."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}
        self.copied: Any = None  # a CUDA event after which the buffers may be filled again

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape over the buffer called `name`, which grows to the largest ever asked for."""
        size = int(np.prod(shape)) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return buffer[:size].view(dtype).view(*shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch: rows as they are stored, and what was drawn for them."""

    latent_BChw: Tensor  # stored dtype, unscaled
    mask_B1hw: Tensor | None  # uint8, 255 is train; None: masks were not asked for
    text_BLD: Tensor
    noise_BChw: Tensor  # float32
    timestep_B: Tensor  # int64
    weight_B: Tensor  # float32
    shots: tuple[Shot, ...]
    last: bool  # of its step
    slot: Slot

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`; training and validation both take it from here."""
        there = replace(
            self, latent_BChw=move(self.latent_BChw, device), text_BLD=move(self.text_BLD, device),
            mask_B1hw=None if self.mask_B1hw is None else move(self.mask_B1hw, device),
            noise_BChw=move(self.noise_BChw, device), timestep_B=move(self.timestep_B, device),
            weight_B=move(self.weight_B, device),
        )  # fmt: skip
        self.slot.copied = record_copies(device)
        return there


class Rows:
    """Reads rows of an index, checked against what the manifest says of them."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.reader = Reader(index.manifest.cache_root)
        self._unconditional = index.manifest.document["prompts"]["unconditional"]

    def latent_ref(self, shot: Shot) -> RowRef:
        """Where a shot's latent is."""
        views = self.index.samples.views
        return self.index.ref(int(views["latent_shard"][shot.view]), int(views["latent_row"][shot.view]))

    def mask_ref(self, shot: Shot) -> RowRef | None:
        """Where a shot's mask is; `None`: all ones."""
        views = self.index.samples.views
        shard = int(views["mask_shard"][shot.view])
        return None if shard < 0 else self.index.ref(shard, int(views["mask_row"][shot.view]))

    def text_ref(self, shot: Shot) -> RowRef:
        """Where a shot's text is."""
        if shot.text == NO_TEXT:
            return self.index.ref(self._unconditional["shard"], self._unconditional["row"])
        texts = self.index.samples.texts
        return self.index.ref(int(texts["shard"][shot.text]), int(texts["row"][shot.text]))

    def fill(self, out: Tensor, field: str, array: str, refs: Sequence[RowRef]) -> None:
        """Fills `out` [B, …] from B places. Raises `CacheError` when rows are not of its shape and dtype."""
        for shard in {ref.shard for ref in refs}:
            spec, _ = self.reader.array_info(shard, array)
            if spec.shape != tuple(out.shape[1:]) or DTYPES[spec.dtype] != out.dtype:
                wanted = str(out.dtype).removeprefix("torch.")
                raise CacheError(f"shard {shard}, array '{array}' has rows {list(spec.shape)} {spec.dtype}, expected "
                                 f"{field} rows {list(out.shape[1:])} {wanted}", hint="prep verify MANIFEST")
        raw = out.view(len(refs), -1).view(torch.uint8).numpy()
        self.reader.read_batch(raw, array, refs)

    def text(self, refs: Sequence[RowRef]) -> Tensor:
        """Text rows in fresh memory, `[B, L, D]`: what sampling takes."""
        dtype = DTYPES[str(self.index.manifest.fields["text"].arrays["hidden"]["dtype"])]
        out = torch.empty((len(refs), *self.index.text_shapes["hidden"]), dtype=dtype)
        self.fill(out, "text", "hidden", refs)
        return out

    def advise(self, request: Request, masked: bool) -> None:
        """Tells the kernel which rows come soon; what is missing or damaged is told when it is read."""
        with suppress(CacheError):
            self.reader.advise("latent", [self.latent_ref(shot) for shot in request.shots])
            self.reader.advise("hidden", [self.text_ref(shot) for shot in request.shots])
            if masked:
                self.reader.advise("mask", [ref for shot in request.shots if (ref := self.mask_ref(shot))])


def read(rows: Rows, request: Request, slot: Slot, *, masked: bool) -> Batch:
    """The batch of a request in the buffers of `slot`. Raises `CacheError` with the samples' names."""
    count, shots, fields = len(request.shots), request.shots, rows.index.manifest.fields

    def take(field: str, array: str) -> Tensor:
        dtype = DTYPES[str(fields[field].arrays[array]["dtype"])]
        return slot.take(field, (count, *rows.index.shape(field, request.bucket)[array]), dtype)

    latent, text = take("latent", "latent"), take("text", "hidden")
    mask = take("mask", "mask") if masked else None
    try:
        _fill(rows, shots, latent, text, mask)
    except CacheError as error:
        bad = [shot for shot in shots if _is_bad(rows, shot, latent, text, mask)]
        names = ", ".join(sorted({f"'{safe(rows.index.samples.name(shot.sample))}'" for shot in bad}))
        raise CacheError(f"{error.message} (needed for {names})", hint=error.hint) from None
    noise = slot.take("noise", latent.shape, torch.float32)
    for out, shot in zip(noise.numpy(), shots, strict=True):
        philox(shot.noise).standard_normal(out=out, dtype=np.float32)
    timestep = slot.take("timestep", (count,), torch.int64)
    timestep.numpy()[:] = [shot.timestep for shot in shots]
    weight = slot.take("weight", (count,), torch.float32)
    weight.numpy()[:] = [shot.weight for shot in shots]
    return Batch(latent_BChw=latent, mask_B1hw=mask, text_BLD=text, noise_BChw=noise, timestep_B=timestep,
                 weight_B=weight, shots=shots, last=request.last, slot=slot)


@contextmanager
def batches(rows: Rows, requests: Iterator[Request], *, masked: bool, pinned: bool) -> Iterator[Iterator[Batch]]:
    """Batches of `requests` in their order, made ahead by a thread that ends with the block.

    What goes wrong in the thread is raised where the batch was to come.
    """
    ring = _Ring(pinned)
    thread = threading.Thread(target=_work, args=(rows, requests, ring, masked), name="batches", daemon=True)
    thread.start()
    try:
        yield _hand_out(ring)
    finally:
        ring.closed = True
        ring.free.put(Slot(False))  # wakes the thread where it waits for one
        thread.join()


class _Ring:
    """The buffers between the thread and the loop; their number bounds how far the thread runs ahead."""

    def __init__(self, pinned: bool) -> None:
        self.free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()  # None: no more come
        self.closed = False
        for _ in range(SLOTS):
            self.free.put(Slot(pinned))


def _work(rows: Rows, requests: Iterator[Request], ring: _Ring, masked: bool) -> None:
    try:
        for request in _advised(rows, requests, masked):
            slot = ring.free.get()
            if ring.closed:
                return
            if slot.copied is not None:
                slot.copied.synchronize()
            ring.ready.put(read(rows, request, slot, masked=masked))
        ring.ready.put(None)
    except BaseException as error:
        ring.ready.put(error)


def _advised(rows: Rows, requests: Iterator[Request], masked: bool) -> Iterator[Request]:
    """The requests, each told to the kernel `AHEAD` of its turn."""
    waiting: deque[Request] = deque()
    for request in requests:
        rows.advise(request, masked)
        waiting.append(request)
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting


def _hand_out(ring: _Ring) -> Iterator[Batch]:
    while (given := ring.ready.get()) is not None:
        if isinstance(given, BaseException):
            raise given
        yield given
        ring.free.put(given.slot)


def _fill(rows: Rows, shots: Sequence[Shot], latent_BChw: Tensor, text_BLD: Tensor, mask_B1hw: Tensor | None) -> None:
    rows.fill(latent_BChw, "latent", "latent", [rows.latent_ref(shot) for shot in shots])
    rows.fill(text_BLD, "text", "hidden", [rows.text_ref(shot) for shot in shots])
    if mask_B1hw is not None:
        _fill_masks(rows, mask_B1hw, shots)


def _is_bad(rows: Rows, shot: Shot, latent_BChw: Tensor, text_BLD: Tensor, mask_B1hw: Tensor | None) -> bool:
    """Whether this shot's rows cannot be read; the first place of the buffers is overwritten."""
    try:
        _fill(rows, [shot], latent_BChw[:1], text_BLD[:1], None if mask_B1hw is None else mask_B1hw[:1])
    except CacheError:
        return True
    return False


def _fill_masks(rows: Rows, mask_B1hw: Tensor, shots: Sequence[Shot]) -> None:
    """Masks where there are some, 255 where there are none."""
    refs = [rows.mask_ref(shot) for shot in shots]
    mask_B1hw.fill_(255)
    for number, ref in enumerate(refs):
        if ref is not None:
            rows.fill(mask_B1hw[number : number + 1], "mask", "mask", [ref])
