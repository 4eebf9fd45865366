"""The update of a step: gradients summed over ranks and clipped, the optimizer, the average, and the step's log line.

A step whose loss or gradients are not finite updates nothing. `Now`: the host reads a step's numbers before its update.
`Late`, on one GPU: AdamW's fused kernels leave out such an update, so the host reads the numbers while the device
computes the passes of the next step, and the device never waits for the host. `Within` the backward pass: the host
reads the loss before that; a gradient that is not finite shows when weights are updated, and ends the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from prep.loader.device import Arriving
from prep.loader.draws import Draw
from train.failures import NotFinite, Progress
from train.optim.singly import at_gradients
from train.parallel.ranks import ALONE, Ranks
from train.parallel.shards import norm_of_norms
from train.runs.log import Log
from train.setup import Setup
from train.state import (
    TrainState,
    apply_gradient,
    apply_gradients,
    clip_gradients,
    in_backward,
    move_averages,
    set_rates,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Sums over this rank's part of a step; the gradients are in the parameters."""

    loss: Tensor  # of its samples, []
    samples: int
    waited: float  # seconds for data
    parts: tuple[tuple[tuple[Draw, ...], Tensor], ...]  # draws and loss of each forward pass
    each: tuple[Tensor, ...]  # the losses of its samples, before any weight


@dataclass(frozen=True, slots=True)
class _Summed:
    """A step whose gradients are summed and clipped, and whose numbers are on their way to the host."""

    step: int  # from 0
    gathered: Gathered
    norm: Tensor  # of all gradients before they were clipped, []
    numbers: Arriving  # loss of this rank's samples, norm of all gradients, and the loss of each of its samples
    scale: float | None  # of the loss, with float16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    """The numbers of a step, over all ranks."""

    loss: float
    norm: float
    samples: int
    showings: list[tuple[int, int, float]]
    overflowed: bool  # float16's gradients, which a smaller scale of the loss helps


class Now:
    """Updates whose numbers the host reads before. A context manager that finishes the last one, also after an error.
    """

    def __init__(self, trainee: TrainState, setup: Setup, log: Log, progress: Progress) -> None:
        self.trainee, self.setup = trainee, setup
        self._log, self.progress = log, progress
        self.since = time.perf_counter()  # when the step that is logged next began

    def gathering(self, step: int, passes: int) -> AbstractContextManager[Callable[[Tensor], None] | None]:
        """The passes of step `step` (from 0) are made within it, so many; what it gives is called with their losses
        between forward and backward."""
        return nullcontext()

    def make(self, step: int, gathered: Gathered) -> None:
        """Updates the weights by the gradients of step `step` (from 0). Raises `NotFinite`."""
        summed = self.sum(step, gathered)
        numbers = self.read(summed)
        self.progress.whole = False
        self.complete(summed, numbers, apply_gradients(self.trainee, self.setup, step, skipped=numbers.overflowed))

    def finish(self) -> None:
        """Makes weights, average and log those of the last step. Raises `NotFinite`, of that step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or isinstance(error, Exception):
            self.finish()

    def sum(self, step: int, gathered: Gathered) -> _Summed:
        """Sums and clips the gradients of a step, without waiting for numbers where they are whole."""
        self.trainee.model.sum_gradients(self.trainee.denoiser.parameters)
        norm = clip_gradients(self.trainee, self.setup.config)
        losses = torch.cat(gathered.each) if gathered.each else torch.zeros(0)
        scale = None if self.trainee.scale is None else self.trainee.scale.value
        return _Summed(step, gathered, norm, Arriving(gathered.loss, norm, losses), scale)

    def read(self, summed: _Summed) -> _Numbers:
        """Waits for the numbers of a step. Raises `NotFinite`."""
        ranks, scale, gathered = self.trainee.ranks, self.trainee.scale, summed.gathered
        own, norm, losses = summed.numbers.wait()
        total, samples = ranks.total([float(own), gathered.samples])
        numbers = _Numbers(loss=total / samples, norm=float(norm), samples=int(samples),
                           showings=_showings(gathered, losses, ranks),
                           overflowed=scale is not None and scale.overflowed(total / samples, float(norm)))
        if not numbers.overflowed:
            check_finite(numbers.loss, numbers.norm, gathered.parts, ranks)
        return numbers

    def complete(self, summed: _Summed, numbers: _Numbers, rate: float) -> None:
        """Follows the updated weights with their average, and logs the step."""
        progress, done = self.progress, summed.step + 1
        move_averages(self.trainee, self.setup.config, summed.step, skipped=numbers.overflowed)
        progress.done, progress.whole = done, True
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        try:
            if self.trainee.ranks.first:
                self._log.losses.add(done, self.setup.index, numbers.showings)
        finally:  # a checkpoint of this step is kept even then, and first writes what both files lack
            self._log("step", done, loss=numbers.loss, lr=rate, grad_norm=numbers.norm, samples=numbers.samples,
                      seconds=seconds, wait=summed.gathered.waited, samples_per_second=numbers.samples / seconds,
                      **_memory(progress.device),
                      **({} if summed.scale is None else {"loss_scale": summed.scale, "skipped": numbers.overflowed}))


class Late(Now):
    """Updates that leave themselves out if the numbers are not finite, which the host reads later."""

    _unread: tuple[_Summed, float] | None = None  # the last step, and its learning rate

    def make(self, step: int, gathered: Gathered) -> None:
        """Updates the weights by the gradients of step `step` (from 0). Raises `NotFinite`, of the step before."""
        self.finish()  # while the device still computes what was gathered
        summed = self.sum(step, gathered)
        self.progress.whole = False
        finite = torch.isfinite(gathered.loss) & torch.isfinite(summed.norm)
        self._unread = summed, apply_gradients(self.trainee, self.setup, step, only_if=finite)

    def finish(self) -> None:
        """Reads the numbers of the last step, if they are still to be read. Raises `NotFinite`."""
        unread, self._unread = self._unread, None
        if unread is not None:
            summed, rate = unread
            try:
                self.complete(summed, self.read(summed), rate)
            except NotFinite:
                self.progress.whole = True  # nothing was updated
                raise


class Within(Now):
    """Updates of each weight within the backward pass, as soon as its gradient is whole, which is freed then: within
    the last one of a step, which has several if references are dropped from a part of the samples."""

    _rate, _left = 0.0, 0  # of the step: the rate by `optimizer.lr`, and its passes to come

    def __init__(self, trainee: TrainState, setup: Setup, log: Log, progress: Progress) -> None:
        super().__init__(trainee, setup, log, progress)
        self._norms: dict[str, Tensor] = {}  # of the step's gradients so far

    @contextmanager
    def gathering(self, step: int, passes: int) -> Iterator[Callable[[Tensor], None]]:
        """As `Now.gathering`; the weights are updated within it. Raises `NotFinite` if the loss is not finite."""
        trainee, config = self.trainee, self.setup.config
        assert trainee.singly is not None
        self._norms, self._left, self._rate = {}, passes, set_rates(trainee, self.setup, step)

        def update(name: str, value: nn.Parameter) -> None:
            if self._left == 0:
                self.progress.whole = False
                self._norms[name] = apply_gradient(trainee, config, step, name, value)

        with trainee.singly.apart():
            with at_gradients(trainee.denoiser.parameters, update):
                yield self._check
            for name, value in trainee.denoiser.parameters.items():
                if value.grad is not None:  # of passes before the last, which had none
                    update(name, value)

    def _check(self, loss: Tensor) -> None:
        self._left -= 1
        if not math.isfinite(value := float(loss)):
            raise NotFinite(value, None, self.progress.draws)

    def make(self, step: int, gathered: Gathered) -> None:
        """Completes step `step` (from 0), whose weights are updated. Raises `NotFinite`."""
        norm = norm_of_norms([self._norms[name] for name in self.trainee.denoiser.parameters if name in self._norms])
        losses = torch.cat(gathered.each)
        summed = _Summed(step, gathered, norm, Arriving(gathered.loss, norm, losses), None)
        self.complete(summed, self.read(summed), self._rate)


def update_of(trainee: TrainState, setup: Setup, log: Log, progress: Progress) -> Now:
    """How the updates of a run are made."""
    kind = Within if in_backward(setup.config) else Late if reads_late(trainee) else Now
    return kind(trainee, setup, log, progress)


def reads_late(trainee: TrainState) -> bool:
    """Whether the host reads the numbers of a step after its update, and the optimizer itself leaves out one whose
    numbers are not finite. Several ranks tell each other their losses, and the scale of float16 moves, before it."""
    return (trainee.denoiser.device.type == "cuda" and trainee.spec.skips_on_inf and trainee.scale is None
            and trainee.ranks.world == 1)


def check_finite(loss: float, norm: float, parts: Iterable[tuple[tuple[Draw, ...], Tensor]],
                 ranks: Ranks = ALONE) -> None:
    """Raises `NotFinite` on every rank unless both are finite. `parts`: the draws of each forward pass of this rank,
    and the sum of their losses."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    passes = list(parts)
    failing = [draws for draws, loss in passes if not math.isfinite(float(loss))]
    if not ranks.any(bool(failing)):
        failing = [draws for draws, _ in passes]
    shown = ranks.gather([asdict(draw) for draws in failing for draw in draws])
    raise NotFinite(loss, norm, (_draw(draw) for draws in shown for draw in draws))


def _draw(fields: Mapping[str, Any]) -> Draw:
    """A draw from its fields, in which JSON has lists instead of tuples."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                              for name, value in fields.items()}
    return Draw(**values)


def _showings(gathered: Gathered, losses: Tensor, ranks: Ranks) -> list[tuple[int, int, float]]:
    """Sample, timestep and loss of each showing of the step, on all ranks; `losses` are those of this rank."""
    draws = [draw for draws, _ in gathered.parts for draw in draws]
    own = [(draw.sample, draw.timestep, loss) for draw, loss in zip(draws, losses.tolist(), strict=True)]
    return [showing for showings in ranks.gather(own) for showing in showings]


def _memory(device: torch.device) -> dict[str, int]:
    """The most memory that tensors have taken so far on a GPU."""
    return {"memory": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
