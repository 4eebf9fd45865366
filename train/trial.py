"""Tries the largest bucket before the first step: whether memory suffices, with or without gradient checkpointing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.rows import Rows
from prep.models.device.memory import free_memory, is_out_of_memory
from prep.training.checks import AUTO
from train.failures import TRYING, Progress
from train.models.recomputed import recomputed
from train.optim.singly import at_gradients
from train.setup import Setup
from train.state import TrainState, forward_backward, in_backward

ON = ("gradient checkpointing is on, since without it a pass over the largest bucket ran out of memory: steps take "
      "longer and stay the same")


def tried(trainee: TrainState, setup: Setup, progress: Progress) -> tuple[Setup, list[str]]:
    """The setup after a pass over the largest bucket, and what is worth saying. If gradient checkpointing is "auto",
    and memory does not suffice on any rank, it is turned on for all, which try again."""
    config = setup.config
    progress.recomputes, fits = config.recomputes, True
    with trainee.model.passes():
        if config.gradient_checkpointing == AUTO and not config.recomputes:
            fits = _fits(trainee, setup, progress)
        else:
            warm_up_largest_bucket(trainee, setup, progress)
    if not trainee.ranks.any(not fits):
        return setup, []
    trainee.model.drop_gradients(trainee.denoiser.parameters)
    free_memory(progress.device)
    trainee.denoiser.model.enable_gradient_checkpointing(recomputed)
    progress.recomputes = True
    with trainee.model.passes():
        warm_up_largest_bucket(trainee, setup, progress)
    return replace(setup, config=replace(config, gradient_checkpointing=True)), [ON]


def _fits(trainee: TrainState, setup: Setup, progress: Progress) -> bool:
    """Whether memory suffices; the error, whose frames hold tensors, is gone when this returns."""
    try:
        warm_up_largest_bucket(trainee, setup, progress)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def warm_up_largest_bucket(trainee: TrainState, setup: Setup, progress: Progress) -> None:
    """One forward and backward pass over the largest bucket, with memory held for what the optimizer keeps, and for the
    gradients of passes before it, if a step has several.

    Too little memory then shows at once, and not in the step that meets this bucket first. Nothing else changes.
    """
    if progress.done >= setup.steps:
        return
    somewhere = next(iter(trainee.denoiser.parameters.values()))
    size = setup.model.state_bytes // (trainee.ranks.world if trainee.model.sharded else 1)
    moments = somewhere.new_empty(0 if trainee.optimizer.state or trainee.spec.paged else size, dtype=torch.uint8)
    most, world = setup.config.micro_batch, trainee.ranks.world
    request = draws.trial(setup.index, setup.plan, most, world)
    if draws.accumulates(setup.plan, most, world):
        trainee.model.hold_gradients(trainee.denoiser.parameters)
    progress.draws, progress.during = request.draws, TRYING
    freed = trainee.denoiser.parameters if in_backward(setup.config) else {}
    with batches(Rows(setup.index), iter([request]), masked=setup.masked, pinned=False) as feed, at_gradients(
            freed, _free):
        for batch in feed:
            forward_backward(trainee, setup.config, batch)
    trainee.model.drop_gradients(trainee.denoiser.parameters)
    progress.draws, progress.during = (), ""
    del moments


def _free(name: str, value: nn.Parameter) -> None:
    value.grad = None
