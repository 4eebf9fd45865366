"""Shared parts of training from scratch: an average of the weights, a clock, a learning rate, a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class Average:
    """The exponential moving average of the parameters of some networks."""

    def __init__(self, networks: Iterable[Any], *, decay: float) -> None:
        self.parameters = [parameter for network in networks for parameter in network.parameters()]
        self.values = [parameter.detach().clone() for parameter in self.parameters]
        self.decay, self.steps = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        """Moves toward the current parameters, quickly in the first steps."""
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 10))
        torch._foreach_lerp_(self.values, self.parameters, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the average and the networks' parameters."""
        for value, parameter in zip(self.values, self.parameters, strict=True):
            kept = value.clone()
            value.copy_(parameter)
            parameter.copy_(kept)


def progress(minutes: float) -> Iterator[tuple[int, float]]:
    """Step number and elapsed fraction of `minutes`, until the time is over."""
    start, step = time.monotonic(), 0
    while (done := (time.monotonic() - start) / 60 / minutes) < 1:
        yield step, done
        step += 1


def learning_rate(peak: float, step: int, done: float) -> float:
    """Rises over 200 steps, then falls along a cosine as the time runs out."""
    return peak * min(1.0, (step + 1) / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def advance(optimizer: torch.optim.Optimizer, loss: Tensor, *, rate: float) -> None:
    """One step of `optimizer` on `loss`, with the gradient norm clipped to 1."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_([value for group in optimizer.param_groups for value in group["params"]], 1.0)
    optimizer.step()
