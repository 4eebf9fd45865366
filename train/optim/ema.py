"""An exponential moving average of named parameters, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

Shadow = dict[str, Tensor]


def decay_at(step: int, decay: float) -> float:
    """The decay of update `step` (from 0): min(decay, (1 + step) / (10 + step)), so early weights fade quickly.

    The same as TensorFlow's `ExponentialMovingAverage(num_updates=…)`; 0.9999 is reached after 90,000 steps.
    """
    return min(decay, (1 + step) / (10 + step))


def start(parameters: Mapping[str, Tensor]) -> Shadow:
    """A shadow equal to `parameters`."""
    return {name: value.detach().clone() for name, value in parameters.items()}


@torch.no_grad()
def update(shadow: Shadow, parameters: Mapping[str, Tensor], decay: float) -> None:
    """Moves the shadow toward `parameters`: shadow ← decay·shadow + (1 - decay)·parameter."""
    torch._foreach_lerp_(list(shadow.values()), [parameters[name].detach() for name in shadow], 1 - decay)


@contextmanager
def swapped_in(shadow: Shadow | None, parameters: Mapping[str, Tensor], *, copied: bool = False) -> Iterator[None]:
    """Swaps the values of parameters and shadow inside the `with` block; does nothing without a shadow.

    `copied`: in the same memory, which a divided model is gathered from.
    """
    swap = _swap_values if copied else _swap
    swap(shadow or {}, parameters)
    try:
        yield
    finally:
        swap(shadow or {}, parameters)


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
