"""Makes batches: one background thread reads rows into a ring of reused buffers and adds the draws.

A batch's buffers belong to the ring and are filled again some time after the loop asks for the next batch: then, or
when the loop says that it can spare the GIL (`Batch.spare_gil`). Of small batches the ring has more, and the thread
makes several at a time, since beside a model it is slow to start: the model has filled the processor's caches. On CUDA
buffers are pinned and copied asynchronously; an event keeps the thread from refilling them too early. One thread makes
20,000 samples per second with all their draws (the demo's rows, one core of a 2-core EPYC), so there are no worker
processes. For larger latents noise takes the longest, so separate threads draw it.
B samples, C channels, h w latent cells.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prep.cache.damage import UnrecordedDamage
from prep.cache.reader import RowTargets
from prep.cache.remote.quota import NotFetched
from prep.errors import CacheError
from prep.formatting import printable
from prep.fs.remote.errors import StoreError
from prep.loader.device import record_copies, to_device
from prep.loader.draws import BatchRequest, Draw
from prep.loader.noise import PLAIN, Noise
from prep.loader.prefetch import prefetched
from prep.loader.rows import DTYPES, RowPlaces, Rows, split
from prep.loader.sizes import sizes_of
from prep.manifest.commands import repair_command
from prep.models.fields import STD
from prep.runtime import usable_cores

SLOTS = 4  # batches that may be ready or in use at a time
MOST_SLOTS = 16  # of small batches, which together take no more than `SMALL_RING`
SMALL_RING = 8 << 20  # bytes
MOST_SHAPES = 64  # of one buffer, as buckets and captions have them, that are kept ready
AHEAD = 4  # batches whose rows the kernel may prefetch before they are read
DRAWERS = min(4, usable_cores())  # threads that draw noise
WORTH_THREADS = 1 << 15  # noise values per batch; fewer are drawn at once by the thread that reads


def _nothing() -> None:
    pass


class _View:
    """A tensor over a buffer."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @cached_property
    def targets(self) -> RowTargets:
        """The tensor as targets for the reader."""
        return split(self.tensor)


class Slot:
    """One of the ring's sets of buffers."""

    def __init__(self, pinned: bool, refill: Callable[[], None] = _nothing) -> None:
        self._pinned, self.refill = pinned, refill
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, dict[tuple[Any, ...], _View]] = {}  # of each buffer, by shape and dtype
        self._taken: dict[str, _View] = {}
        self.copied: Any = None  # a CUDA event after which the buffers may be filled again

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape over the buffer `name`, which grows to the largest size requested."""
        kind = (*shape, dtype)
        views = self._views.setdefault(name, {})
        taken = views.get(kind)
        if taken is None:
            size = int(np.prod(shape)) * dtype.itemsize
            buffer = self._buffers.get(name)
            if buffer is None or len(buffer) < size:
                views.clear()
                buffer = self._buffers[name] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            elif len(views) >= MOST_SHAPES:
                views.clear()
            taken = views[kind] = _View(buffer[:size].view(dtype).view(*shape))
        self._taken[name] = taken
        return taken.tensor

    @property
    def bytes(self) -> int:
        """The memory of the buffers, in bytes."""
        return sum(map(len, self._buffers.values()))

    def targets(self, name: str) -> RowTargets:
        """The tensor last taken by this name as targets for the reader, made once."""
        return self._taken[name].targets


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch: rows as stored, and their draws."""

    latent_BChw: Tensor  # unscaled; the stored mean in its dtype, or float32 if drawn from the posterior
    mask_B1hw: Tensor | None  # uint8, 255: trains; None: masks were not requested
    inpaint_mask_BMhw: Tensor | None  # uint8, 255: to be painted; None: the family does not inpaint
    text: Mapping[str, Tensor]  # the arrays of text rows, [B, …] each, as the family names them
    sizes_B6: Tensor  # float32: original height and width, top and left of the crop, height and width of the bucket
    noise_BChw: Tensor  # float32
    input_noise_BChw: Tensor  # that of the model's input: the same, or perturbed
    timestep_B: Tensor  # int64
    weight_B: Tensor  # float32
    references: tuple[Tensor, ...]  # [B, C, h, w] each, as stored; their sizes may differ
    opposite_BChw: Tensor | None  # as latent_BChw: the other picture of each pair; None: samples are no pairs
    draws: tuple[Draw, ...]
    slot: Slot
    padding: bool  # its samples do not count

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`, for training and validation."""
        if device.type == "cpu":
            return self
        copy = replace(
            self, latent_BChw=to_device(self.latent_BChw, device), sizes_B6=to_device(self.sizes_B6, device),
            text={name: to_device(array, device) for name, array in self.text.items()},
            mask_B1hw=None if self.mask_B1hw is None else to_device(self.mask_B1hw, device),
            inpaint_mask_BMhw=None if self.inpaint_mask_BMhw is None else to_device(self.inpaint_mask_BMhw, device),
            references=tuple(to_device(reference, device) for reference in self.references),
            opposite_BChw=None if self.opposite_BChw is None else to_device(self.opposite_BChw, device),
            noise_BChw=(noise := to_device(self.noise_BChw, device)), timestep_B=to_device(self.timestep_B, device),
            input_noise_BChw=(noise if self.input_noise_BChw is self.noise_BChw
                              else to_device(self.input_noise_BChw, device)),
            weight_B=to_device(self.weight_B, device),
        )  # fmt: skip
        self.slot.copied = record_copies(device)
        return copy

    def spare_gil(self) -> None:
        """Lets the thread fill the buffers of batches before this one now, while the loop is in a long call that
        needs no GIL: backward. Else it would in the next forward pass, and each of its calls would wait for the GIL.
        """
        self.slot.refill()


def read(rows: Rows, request: BatchRequest, places: RowPlaces, slot: Slot, drawers: ThreadPoolExecutor, *,
         masked: bool) -> Batch:
    """Reads and draws a request's batch into the buffers of `slot`. Raises `CacheError` with the samples' names."""
    count, draws, fields = len(request.draws), request.draws, rows.index.manifest.fields

    def take(field: str, array: str) -> Tensor:
        dtype = DTYPES[str(fields[field].arrays[array]["dtype"])]
        return slot.take(array, (count, *rows.index.shape(field, request.bucket)[array]), dtype)

    latent, inpaints = take("latent", "latent"), rows.index.inpaints
    mask = take("mask", "mask") if masked or inpaints else None
    posterior = [draw.posterior for draw in draws if draw.posterior is not None]  # of all draws, or of none
    std = take("latent", STD) if posterior else None
    references = _take_references(slot, [(count, *shape) for shape in rows.reference_shapes(draws[0])], latent.dtype)
    buffers = _Buffers(latent=latent, std=std, mask=mask, references=references, slot=slot,
                       text=partial(_take_text, rows, slot))
    noise, drawn = (slot.take(name, latent.shape, torch.float32) for name in ("noise", "drawn"))
    input_noise = slot.take("given", latent.shape, torch.float32) if request.noise.perturbation else noise
    drawing = _draw_noise(request.noise, noise, input_noise, [draw.noise for draw in draws], drawers)
    drawing += _draw_noise(PLAIN, drawn, drawn, posterior, drawers) if posterior else []
    try:
        text = _fill(rows, places, buffers)
    except (StoreError, NotFetched):  # their hints help, and each look for its rows would ask the store again
        raise
    except CacheError as error:
        raise _named(error, rows, draws, buffers) from None
    timestep = slot.take("timestep", (count,), torch.int64)
    timestep.numpy()[:] = [draw.timestep for draw in draws]
    weight = slot.take("weight", (count,), torch.float32)
    weight.numpy()[:] = [draw.weight for draw in draws]
    sizes = slot.take("sizes", (count, 6), torch.float32)
    sizes.numpy()[:] = sizes_of(rows.index, draws)
    for part in drawing:
        part.result()
    return Batch(latent_BChw=latent if std is None else drawn_latents(latent, std, drawn), text=text,
                 mask_B1hw=_of_cells(mask) if masked else None, inpaint_mask_BMhw=mask if inpaints else None,
                 sizes_B6=sizes, noise_BChw=noise, input_noise_BChw=input_noise, timestep_B=timestep, weight_B=weight,
                 references=() if rows.index.paired else references,
                 opposite_BChw=references[0] if rows.index.paired else None, draws=draws, slot=slot,
                 padding=request.padding)


def _of_cells(mask_BMhw: Tensor | None) -> Tensor | None:
    """[B, 1, h, w]: the mean of each cell's pixels, rounded, of a mask that has them all."""
    if mask_BMhw is None or mask_BMhw.shape[1] == 1:
        return mask_BMhw
    return mask_BMhw.float().mean(dim=1, keepdim=True).round().to(torch.uint8)


def _draw_noise(how: Noise, noise_BChw: Tensor, input_BChw: Tensor, keys: Sequence[tuple[int, int]],
                drawers: ThreadPoolExecutor) -> list[Future[None]]:
    """Draws each draw's noise, and the input's, from its own key; threads may do it, which changes no number.

    Drawing dominates the time of a batch (12 ns per number; reading takes 0.2 ns), and NumPy releases the GIL for it.
    """
    def draw(part: slice) -> None:
        for noise, perturbed, key in zip(noise_BChw.numpy()[part], input_BChw.numpy()[part], keys[part], strict=True):
            how.draw(key, noise)
            if input_BChw is not noise_BChw:
                how.perturb(key, noise, perturbed)

    if noise_BChw.numel() < WORTH_THREADS:
        draw(slice(None))
        return []
    parts = min(DRAWERS, len(keys))
    return [drawers.submit(draw, slice(number, None, parts)) for number in range(parts)]


def drawn_latents(mean_BChw: Tensor, std_BChw: Tensor, noise_BChw: Tensor) -> Tensor:
    """Draws from the posterior, in the memory of `noise_BChw`.

    Two operations that round once each: a fused one may round differently at the end of a tensor, and a latent would
    then depend on its place in the batch.
    """
    return noise_BChw.mul_(std_BChw).add_(mean_BChw)


@contextmanager
def batches(rows: Rows, requests: Iterator[BatchRequest], *, masked: bool, pinned: bool,
            sharing: int = 1) -> Iterator[Iterator[Batch]]:
    """Batches of `requests` in order, prepared ahead by a thread that ends with the block.

    `sharing`: how many processes of this computer read so. An error in the thread is raised when the loop asks for that
    batch.
    """
    ring = _Ring(pinned)
    thread = threading.Thread(target=_work, args=(rows, requests, ring, masked, sharing), name="batches", daemon=True)
    thread.start()
    try:
        yield _hand_out(ring)
    finally:
        ring.closed.set()
        ring.free.put(Slot(False))  # wakes the thread if it waits for a slot
        thread.join()
        ring.let_go()


class _Ring:
    """The buffers between the thread and the loop; their number limits how far the thread runs ahead."""

    def __init__(self, pinned: bool) -> None:
        self.free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()  # None: no more batches
        self.closed = threading.Event()
        self._pinned = pinned
        self._used: list[Slot] = []  # of batches before the one in use
        self._slots: list[Slot] = []
        for _ in range(SLOTS):
            self._add()

    def _add(self) -> None:
        slot = Slot(self._pinned, self.refill)
        self._slots.append(slot)
        self.free.put(slot)

    def grow(self, filled: Slot) -> None:
        """Adds buffers if those that the thread has filled are small."""
        if len(self._slots) < MOST_SLOTS and filled.bytes * MOST_SLOTS <= SMALL_RING:
            self._add()

    def refill(self) -> None:
        """Gives the thread the buffers that are no longer in use, if they are nearly half of all."""
        if len(self._used) >= max(1, len(self._slots) // 2 - 1):
            self._give_all()

    def _give_all(self) -> None:
        for slot in self._used:
            self.free.put(slot)
        self._used.clear()

    def next(self) -> Batch | BaseException | None:
        """Waits for the next batch."""
        if self.ready.empty():  # no time to lose
            self._give_all()
        return self.ready.get()

    def let_go(self) -> None:
        """Ends the making of batches. The buffers do not wait for the collector: they and the ring no longer name each
        other."""
        for slot in self._slots:
            slot.refill = _nothing

    def give_back(self, slot: Slot) -> None:
        """Takes back the buffers of a batch that is no longer in use."""
        self.refill()
        self._used.append(slot)


def _work(rows: Rows, requests: Iterator[BatchRequest], ring: _Ring, masked: bool, sharing: int) -> None:
    rows = rows.until(ring.closed)
    try:
        with ThreadPoolExecutor(DRAWERS, "noise") as drawers:
            fetched = prefetched(rows, requests, masked=masked, sharing=sharing, ended=ring.closed.is_set)
            for request, places in _advised(rows, fetched, masked):
                slot = ring.free.get()
                if ring.closed.is_set():
                    return
                if slot.copied is not None:
                    slot.copied.synchronize()
                ring.ready.put(read(rows, request, places, slot, drawers, masked=masked))
                ring.grow(slot)
        ring.ready.put(None)
    except BaseException as error:
        ring.ready.put(error)


def _advised(rows: Rows, requests: Iterator[BatchRequest], masked: bool) -> Iterator[tuple[BatchRequest, RowPlaces]]:
    """The requests and the places of their rows; the kernel gets a prefetch hint for each, `AHEAD` requests early."""
    waiting: deque[tuple[BatchRequest, RowPlaces]] = deque()
    for request in requests:
        places = rows.places(request.draws, masked=masked)
        rows.advise(places)
        waiting.append((request, places))
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting


def _hand_out(ring: _Ring) -> Iterator[Batch]:
    while (batch := ring.next()) is not None:
        if isinstance(batch, BaseException):
            raise batch
        yield batch
        ring.give_back(batch.slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Buffers:
    """The tensors of a batch to be filled; `slot` owns them."""

    latent: Tensor
    std: Tensor | None  # None: latents are not drawn
    mask: Tensor | None
    references: Sequence[Tensor]
    slot: Slot
    text: Callable[[Sequence[int] | None, int], dict[str, Tensor]]  # of rows with so many tokens


def _take_text(rows: Rows, slot: Slot, tokens: Sequence[int] | None, count: int) -> dict[str, Tensor]:
    return {name: slot.take(f"text.{name}", (count, *shape), rows.text_dtype(name))
            for name, shape in rows.text_shapes(tokens).items()}


def _take_references(slot: Slot, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(slot.take(_reference(number), shape, dtype) for number, shape in enumerate(shapes))


def _reference(number: int) -> str:
    """The name of a reference's buffer."""
    return f"reference{number}"


def _fill(rows: Rows, places: RowPlaces, out: _Buffers) -> dict[str, Tensor]:
    """Reads rows of all fields, and returns those of text; a missing mask is all 255."""
    latents, texts = places.latents, places.texts
    rows.fill(out.latent, "latent", "latent", latents, out.slot.targets("latent"))
    if out.std is not None:
        rows.fill(out.std, "latent", STD, latents, out.slot.targets(STD))
    for number, (reference, refs) in enumerate(zip(out.references, places.references, strict=True)):
        rows.fill(reference, "latent", "latent", refs, out.slot.targets(_reference(number)))
    tokens = rows.tokens(texts)
    text = out.text(tokens, len(texts))
    rows.fill_text(text, texts, tokens, {name: out.slot.targets(f"text.{name}") for name in text})
    if out.mask is not None:
        out.mask.fill_(255)
        rows.fill(out.mask, "mask", "mask", places.masks, out.slot.targets("mask"))
    return text


def _named(error: CacheError, rows: Rows, draws: Sequence[Draw], out: _Buffers) -> CacheError:
    """An error of reading rows that names the samples whose rows these are."""
    bad = [draw for draw in draws if _is_bad(rows, draw, out)]
    names = ", ".join(sorted({f"'{printable(rows.index.samples.name(draw.sample))}'" for draw in bad or draws}))
    return CacheError(f"{error.message} (needed for {names})",
                      hint=repair_command(rows.index.manifest, recorded=not isinstance(error, UnrecordedDamage)))


def _is_bad(rows: Rows, draw: Draw, out: _Buffers) -> bool:
    """Whether this draw's rows cannot be read."""
    slot = Slot(False)
    mask = None if out.mask is None else slot.take("mask", (1, *out.mask.shape[1:]), out.mask.dtype)
    std = None if out.std is None else slot.take(STD, (1, *out.std.shape[1:]), out.std.dtype)
    references = _take_references(slot, [(1, *each.shape[1:]) for each in out.references], out.latent.dtype)
    buffers = _Buffers(latent=slot.take("latent", (1, *out.latent.shape[1:]), out.latent.dtype), std=std, mask=mask,
                       references=references, slot=slot, text=partial(_take_text, rows, slot))
    try:
        _fill(rows, rows.places([draw], masked=mask is not None), buffers)
    except CacheError:
        return True
    return False
