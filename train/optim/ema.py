"""Moving averages of named parameters, in float32: beside them, or in host memory.

Besides the exponential one there are power-function averages (Karras et al. 2024, "Analyzing and Improving the Training
Dynamics of Diffusion Models", section 3.1), whose weight of step t grows with t^gamma. Their length is sigma_rel, the
standard deviation of that profile in parts of the training time. From two of them at several steps any other length can
be made afterwards: `train.merging.posthoc`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from prep.loader.device import Arriving, copied_to_host

Shadow = dict[str, Tensor]
LONGEST = 12**-0.5  # of gamma 0: all steps count alike


def decay_at(step: int, decay: float) -> float:
    """The decay of update `step` (from 0): min(decay, (1 + step) / (10 + step)), so early weights fade quickly.

    The same as TensorFlow's `ExponentialMovingAverage(num_updates=…)`; 0.9999 is reached after 90,000 steps.
    """
    return min(decay, (1 + step) / (10 + step))


def exponent_of(length: float) -> float:
    """gamma of the power function whose sigma_rel is `length`, between 0 and `LONGEST`: the largest root of equation 4
    of the paper, sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)), as its authors' code finds it."""
    squared = length**-2
    return float(np.roots([1, 7, 16 - squared, 12 - squared]).real.max())


def power_decay_at(step: int, length: float) -> float:
    """The decay of update `step` (from 0) of a power-function average: (1 - 1/t)^(gamma + 1) with t = step + 1
    (equation 2 of the paper). The first is 0: weights before the first step do not count."""
    return float((1 - 1 / (step + 1)) ** (exponent_of(length) + 1))


def start(parameters: Mapping[str, Tensor]) -> Shadow:
    """A shadow equal to `parameters`."""
    return {name: value.detach().to(torch.float32, copy=True) for name, value in parameters.items()}


@torch.no_grad()
def update(shadow: Shadow, parameters: Mapping[str, Tensor], decay: float) -> None:
    """Moves the shadow toward `parameters`: shadow ← decay·shadow + (1 - decay)·parameter."""
    same = {name: value for name, value in shadow.items() if parameters[name].dtype == value.dtype}
    if same:
        torch._foreach_lerp_(list(same.values()), [parameters[name].detach() for name in same], 1 - decay)
    for name in shadow.keys() - same.keys():
        shadow[name].lerp_(parameters[name].detach().float(), 1 - decay)


class WeightAverage:
    """The moving average of parameters. In host memory, weights on a CUDA GPU come there while it does later
    work, and move the average when it is next updated or read: it is the same, to the bit, if processors round alike.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, in_host: bool) -> None:
        self._in_host = in_host
        self._shadow = {name: _in_host(value) for name, value in parameters.items()} if in_host else start(parameters)
        self._coming: tuple[Arriving, float] | None = None  # weights on their way, and their decay

    @property
    def values(self) -> Shadow:
        """The average after the last update."""
        self._arrive()
        return self._shadow

    def update(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        """Moves the average toward `parameters`, which may change as soon as this returns."""
        if not self._in_host:
            update(self._shadow, parameters, decay)
            return
        self._arrive()
        trained = [parameters[name] for name in self._shadow]
        self._coming = Arriving(*trained), decay
        if not _come_late(trained):
            self._arrive()

    def _arrive(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            arriving, decay = coming
            update(self._shadow, dict(zip(self._shadow, arriving.wait(), strict=True)), decay)


def _come_late(values: list[Tensor]) -> bool:
    """Whether copies of them arrive later; else they have arrived, or are in host memory themselves."""
    return any(value.is_cuda for value in values)


def _in_host(value: Tensor) -> Tensor:
    """A copy in host memory; of a tensor on a CUDA GPU in pages that stay there, which it reads and writes faster."""
    copy = copied_to_host(value).float()
    return copy.pin_memory() if value.is_cuda else copy


@contextmanager
def swapped_in(shadow: Shadow | None, parameters: Mapping[str, Tensor], *, copied: bool = False) -> Iterator[None]:
    """Swaps the values of parameters and shadow inside the `with` block; does nothing without a shadow.

    `copied`: in the same memory, which a divided model is gathered from. So are those of an average in host memory; if
    the weights are in bfloat16, they wait there, too, and have the average rounded to that meanwhile.
    """
    average = shadow or {}
    elsewhere = any(value.device != parameters[name].device for name, value in average.items())
    rounded = elsewhere and any(value.dtype != parameters[name].dtype for name, value in average.items())
    kept = {name: copied_to_host(parameters[name]) for name in average} if rounded else {}
    swap = _swap_values if copied or elsewhere else _swap
    _put(average, parameters) if rounded else swap(average, parameters)
    try:
        yield
    finally:
        _put(kept, parameters) if rounded else swap(average, parameters)


@torch.no_grad()
def _put(values: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


def _swap(shadow: Shadow, parameters: Mapping[str, Tensor]) -> None:
    """Swaps references to the values without copying, so it needs no memory and cannot fail halfway."""
    for name, average in shadow.items():
        shadow[name], parameters[name].data = parameters[name].data, average


@torch.no_grad()
def _swap_values(shadow: Shadow, parameters: Mapping[str, Tensor]) -> None:
    """Swaps the values themselves, a tensor at a time."""
    for name, average in shadow.items():
        before = parameters[name].clone()
        parameters[name].copy_(average)
        average.copy_(before)
