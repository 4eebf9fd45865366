"""The optimizer steps of a run. Each gathers gradients over its micro-batches, and updates the weights.

A step whose loss or gradients are not finite updates nothing. On one GPU, AdamW's fused kernels see to that: the host
reads a step's numbers while the device computes the passes of the next one, and the device never waits for the host.
Elsewhere the host reads them before the update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from prep.batching.rng import draw_key
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.device import Arriving
from prep.loader.device import seed as seed_device
from prep.loader.noise import Noise
from prep.loader.rows import Rows
from train.failures import NotFinite, Progress, check_finite
from train.models.dropout import has_dropout
from train.models.size_shift import chances_by_bucket
from train.objectives.forward import forward, sample_losses
from train.parallel.ranks import Ranks
from train.runs.log import Log
from train.setup import Setup
from train.state import TrainState, add_gradients, apply_gradients, clip_gradients, move_average


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gathered:
    """Sums over this rank's part of a step; the gradients are in the parameters."""

    loss: Tensor  # of its samples
    samples: int
    waited: float  # seconds for data
    parts: tuple[tuple[tuple[draws.Draw, ...], Tensor], ...]  # draws and loss of each forward pass
    each: tuple[Tensor, ...]  # the losses of its samples, before any weight


def steps(trainee: TrainState, rows: Rows, setup: Setup, log: Log, progress: Progress,
          pausing: Callable[[int], bool], explained: Callable[[Exception], Exception]) -> Generator[int]:
    """Runs the optimizer steps; yields the number of finished steps, at least after those steps for which `pausing` is
    true. Weights, average and log are then those of that step. Raises `NotFinite`.
    """
    config, ranks = setup.config, trainee.ranks
    share = draws.Share(rank=ranks.rank, world=ranks.world, level=ranks.sharded)
    requests = draws.training(rows.index, setup.plan, progress.done, setup.steps, dropout=config.caption_dropout,
                              timesteps=trainee.denoiser.timesteps,
                              chances=chances_by_bucket(config.timesteps, setup.shifts),
                              noise=Noise(**asdict(config.noise)), most=config.micro_batch, share=share)
    pinned = trainee.denoiser.device.type == "cuda"
    drops = has_dropout(trainee.denoiser.model)
    with (batches(rows, requests, masked=setup.masked, pinned=pinned, sharing=ranks.local_world) as feed,
          _Updates(trainee, setup, log, progress) as updates):
        for step in range(progress.done, setup.steps):
            if drops:
                _seed(config.seed, step, ranks.rank, progress.device)
            count = draws.passes(setup.plan, step, most=config.micro_batch, share=share)
            with ranks.passing(explained):
                gathered = _gather(trainee, setup, ranks.each(islice(feed, count), explained), progress)
            updates.make(step, gathered)
            if step + 1 == setup.steps or pausing(step + 1):
                updates.finish()
            if progress.done == step + 1:
                yield step + 1
                updates.since = time.perf_counter()


@dataclass(frozen=True, slots=True)
class _Made:
    """A step whose gradients are summed and clipped, and whose numbers are on their way to the host."""

    step: int  # from 0
    gathered: _Gathered
    numbers: Arriving  # loss of this rank's samples, norm of all gradients, and the loss of each of its samples
    scale: float | None  # of the loss, with float16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """The numbers of a step, over all ranks."""

    loss: float
    norm: float
    samples: int
    showings: list[tuple[int, int, float]]
    overflowed: bool  # float16's gradients, which a smaller scale of the loss helps


class _Updates:
    """Makes the updates of a run and logs its steps. A context manager that finishes the last one, also after an error.
    """

    def __init__(self, trainee: TrainState, setup: Setup, log: Log, progress: Progress) -> None:
        self._trainee, self._setup, self._log, self._progress = trainee, setup, log, progress
        self._late = reads_late(trainee)
        self._unread: tuple[_Made, float] | None = None  # and its learning rate
        self.since = time.perf_counter()  # when the step that is logged next began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or isinstance(error, Exception):
            self.finish()

    def make(self, step: int, gathered: _Gathered) -> None:
        """Updates the weights by the gradients of a step. Raises `NotFinite`, for this step or for the one before."""
        self.finish()  # while the device still computes what was gathered
        add_gradients(self._trainee)
        norm = clip_gradients(self._trainee, self._setup)
        losses = torch.cat(gathered.each) if gathered.each else torch.zeros(0)
        scale = None if self._trainee.scale is None else self._trainee.scale.value
        made = _Made(step, gathered, Arriving(gathered.loss, norm, losses), scale)
        if self._late:
            self._progress.whole = False
            finite = torch.isfinite(gathered.loss) & torch.isfinite(norm)
            self._unread = made, apply_gradients(self._trainee, self._setup, step, only_if=finite)
        else:
            read = self._read(made)
            self._progress.whole = False
            self._finish(made, read, apply_gradients(self._trainee, self._setup, step, skipped=read.overflowed))

    def finish(self) -> None:
        """Finishes the step whose numbers are still to be read, if there is one. Raises `NotFinite`."""
        unread, self._unread = self._unread, None
        if unread is not None:
            made, rate = unread
            try:
                self._finish(made, self._read(made), rate)
            except NotFinite:
                self._progress.whole = True  # nothing was updated
                raise

    def _read(self, made: _Made) -> _Read:
        """Waits for the numbers of a step. Raises `NotFinite`."""
        ranks, scale, gathered = self._trainee.ranks, self._trainee.scale, made.gathered
        own, norm, losses = made.numbers.wait()
        summed, samples = ranks.total([float(own), gathered.samples])
        found = _Read(loss=summed / samples, norm=float(norm), samples=int(samples),
                      showings=_showings(gathered, losses, ranks),
                      overflowed=scale is not None and scale.overflowed(summed / samples, float(norm)))
        with ranks.together():
            if not found.overflowed:
                check_finite(found.loss, found.norm, gathered.parts, ranks)
        return found

    def _finish(self, made: _Made, read: _Read, rate: float) -> None:
        """Follows the updated weights with their average, and logs the step."""
        if not read.overflowed:
            move_average(self._trainee, self._setup, made.step)
        done = self._progress.done = made.step + 1
        self._progress.whole = True
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        try:
            if self._trainee.ranks.first:
                self._log.losses.add(done, self._setup.index, read.showings)
        finally:  # a checkpoint of this step is kept even then, and first writes what both files lack
            self._log("step", done, loss=read.loss, lr=rate, grad_norm=read.norm, samples=read.samples, seconds=seconds,
                      wait=made.gathered.waited, samples_per_second=read.samples / seconds,
                      **_memory(self._progress.device),
                      **({} if made.scale is None else {"loss_scale": made.scale, "skipped": read.overflowed}))


def reads_late(trainee: TrainState) -> bool:
    """Whether the host reads the numbers of a step after its update, and the optimizer itself leaves out one whose
    numbers are not finite. Several ranks tell each other their losses, and the scale of float16 moves, before it."""
    return (trainee.denoiser.device.type == "cuda" and trainee.facts.spares and trainee.scale is None
            and trainee.ranks.world == 1)


def _memory(device: torch.device) -> dict[str, int]:
    """The most memory that tensors have taken so far on a GPU."""
    return {"memory": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def _showings(gathered: _Gathered, losses: Tensor, ranks: Ranks) -> list[tuple[int, int, float]]:
    """Sample, timestep and loss of each showing of the step, on all ranks; `losses` are those of this rank."""
    shots = [shot for shots, _ in gathered.parts for shot in shots]
    mine = [(shot.sample, shot.timestep, loss) for shot, loss in zip(shots, losses.tolist(), strict=True)]
    return [showing for showings in ranks.gather(mine) for showing in showings]


def _gather(trainee: TrainState, setup: Setup, feed: Iterator[Batch], progress: Progress) -> _Gathered:
    """Runs forward and backward over every batch of `feed`: one rank's part of one step."""
    loss = torch.zeros((), device=trainee.denoiser.device)
    samples, waited, asked = 0, 0.0, time.perf_counter()
    parts, each = [], []
    for batch in feed:
        progress.shots = batch.shots
        waited += time.perf_counter() - asked
        part, losses = _pass(trainee, setup, batch)
        if not batch.idle:
            each.append(losses)
            loss = loss + part
            samples += len(batch.shots)
            parts.append((batch.shots, part))
        asked = time.perf_counter()
    return _Gathered(loss=loss, samples=samples, waited=waited, parts=tuple(parts), each=tuple(each))


def _pass(trainee: TrainState, setup: Setup, batch: Batch) -> tuple[Tensor, Tensor]:
    """The weighted losses of a micro-batch, summed, and each sample's, after adding its share to the step's gradients.
    """
    settings = setup.config.loss
    given = forward(trainee.denoiser, batch.to(trainee.denoiser.device), trainee.latents, settings)
    each_B = sample_losses(given, settings)
    loss = (each_B * given.weight_B).sum()
    times = 1.0 if trainee.scale is None else trainee.scale.value
    batch.spare_gil()
    (loss * 0.0 if batch.idle else loss * times / setup.config.batch_size).backward()  # type: ignore[no-untyped-call]
    return loss.detach(), each_B.detach()


def try_largest(trainee: TrainState, setup: Setup, progress: Progress) -> None:
    """One forward and backward pass over the largest bucket, with memory held for what the optimizer keeps, and for the
    gradients of passes before it, if a step has several.

    Too little memory then shows at once, and not in the step that meets this bucket first. Nothing else changes.
    """
    if progress.done >= setup.steps:
        return
    somewhere = next(iter(trainee.denoiser.parameters.values()))
    size = setup.state_bytes // (trainee.ranks.world if trainee.ranks.sharded else 1)
    moments = somewhere.new_empty(0 if trainee.optimizer.state else size, dtype=torch.uint8)
    most, world = setup.config.micro_batch, trainee.ranks.world
    request = draws.trial(setup.index, setup.plan, most, world)
    if draws.accumulates(setup.plan, most, world):
        _hold_gradients(trainee)
    progress.shots, progress.trying = request.shots, True
    with batches(Rows(setup.index), iter([request]), masked=setup.masked, pinned=False) as feed:
        for batch in trainee.ranks.each(feed):
            _pass(trainee, setup, batch)
    trainee.optimizer.zero_grad(set_to_none=True)
    if trainee.shards is not None:
        trainee.shards.drop_gradients()
    progress.shots, progress.trying = (), False
    del moments


def _hold_gradients(trainee: TrainState) -> None:
    """Gives each trained parameter a gradient of zeros, to which a pass adds, as it does to that of a pass before."""
    trained = trainee.denoiser.parameters
    for value in trained.values() if trainee.shards is None else [trainee.shards.divided[name] for name in trained]:
        value.grad = torch.zeros_like(value)


def _seed(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seeds torch's generators by step and rank, since dropout draws from them."""
    seed_device(draw_key(seed, step, b"", rank, "dropout-mask")[0], device)
