"""The learning rate range test of `train check --find-lr`: real steps of the real run, thrown away afterwards.

The rate rises exponentially from far too low to far too high (Smith 2017, "Cyclical Learning Rates for Training Neural
Networks", section 3.3). The loss of a step says little: noise and timestep change it more than any rate does. So every
few steps the weights are evaluated on the same pictures, captions, noise and timesteps, spread over all of them, and
the loss is compared with that of the untouched weights on the same draws: of that difference nothing is noise of draws.
Steps are those with which the run begins, so a seed gives the same result again. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite
from statistics import fmean

import torch

from prep.loader import draws
from prep.loader.rows import Rows
from prep.progress import Progress as Show
from prep.runtime import killable
from prep.training.optimizers import OPTIMIZERS
from prep.training.schema import Config, Ema, Schedule
from train.failures import NotFinite, Progress
from train.loop import make_step, step_batches
from train.memory.forecast import blocks_offloaded
from train.rates.curve import DIVERGED, Point, Suggestion, suggest
from train.runs.log import NoLog
from train.setup import Setup
from train.state import TrainState, create_state
from train.trial import tried
from train.update import update_of
from train.validate import losses_of

STEPS, EVERY = 120, 4  # steps, and steps between evaluations
SPAN = 1e3  # from the usual rate of the optimizer divided by this to the same times this
PICTURES, TIMESTEPS = 8, 4  # of an evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The result of a test."""

    points: tuple[Point, ...]
    diverged: float | None  # the rate at which the loss doubled, or was no number; None: it never did
    suggestion: Suggestion
    steps: int  # that were made


def find_rate(setup: Setup, progress: Progress, show: Show, tick: Callable[[int], object]) -> Found:
    """Makes the steps on the device of `progress`. `show`: of what loading takes; `tick`: called for each step.

    Raises `ConfigError`, `ModelError`, `CacheError` and what a run raises.
    """
    setup = _alone(setup)
    device = progress.device
    with killable():
        trainee = create_state(setup, device, offload=blocks_offloaded(setup, device), progress=show)
        setup, _ = tried(trainee, setup, progress)
    points, diverged = list[Point](), None
    with suppress(NotFinite):
        for point in _points(trainee, setup, progress, tick):
            points.append(point)
            if not point.change < DIVERGED:
                diverged = point.rate
                break
        else:
            return Found(points=tuple(points), diverged=None, suggestion=suggest(points), steps=STEPS)
    if diverged is None:  # between two points
        diverged = rate_of(setup.config, progress.done)
    finite = [point for point in points if isfinite(point.change)]
    return Found(points=tuple(finite), diverged=diverged, suggestion=suggest(finite), steps=progress.done)


def rate_of(config: Config, step: int) -> float:
    """The rate of step `step` (from 0)."""
    return OPTIMIZERS[config.optimizer.name].lr * float(SPAN ** (2 * step / (STEPS - 1) - 1))


def _points(trainee: TrainState, setup: Setup, progress: Progress, tick: Callable[[int], object]) -> Iterator[Point]:
    """Makes the steps, and yields the loss after every few of them. Raises `NotFinite`."""
    rows, own = Rows(setup.index), [group["rate"] for group in trainee.optimizer.param_groups]
    before = _loss(trainee, rows, setup)
    usual = setup.config.optimizer.lr or OPTIMIZERS[setup.config.optimizer.name].lr
    with (step_batches(trainee, setup, rows, range(STEPS)) as feed,
          update_of(trainee, setup, NoLog(), progress) as update):
        for step in range(STEPS):
            rate = rate_of(setup.config, step)
            update.setup = replace(setup, config=replace(setup.config, optimizer=replace(
                setup.config.optimizer, lr=rate)))
            for group, layer in zip(trainee.optimizer.param_groups, own, strict=True):
                group["rate"] = None if layer is None else layer * rate / usual  # in the same proportion
            make_step(trainee, setup, update, feed, step, progress)
            tick(1)
            if (step + 1) % EVERY == 0:
                update.finish()
                loss = _loss(trainee, rows, setup)
                yield Point(rate=rate, step=step + 1, loss=loss, change=(loss - before) / before)


def _loss(trainee: TrainState, rows: Rows, setup: Setup) -> float:
    """The mean loss of some training pictures at timesteps spread over the noise schedule, always the same draws."""
    requests = draws.validation(rows.index, setup.config.micro_batch, count=TIMESTEPS, training=True, most=PICTURES,
                                timesteps=trainee.denoiser.timesteps)
    with torch.no_grad():
        losses = losses_of(trainee.denoiser, trainee.model, rows, setup, list(requests), trainee.slide)
    return fmean(chain.from_iterable(losses))


def _alone(setup: Setup) -> Setup:
    """The setup without what a test does not need: schedule and averages."""
    return replace(setup, config=replace(setup.config, schedule=Schedule(name="constant", warmup=0), ema=Ema()),
                   steps=STEPS)
