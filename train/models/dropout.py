"""Whether a model draws random numbers itself when it trains: only then are torch's generators seeded for each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def has_dropout(model: nn.Module) -> bool:
    """Whether a module of `model` drops anything with a probability above 0: dropout, or whatever is called so.

    diffusers and PEFT also keep such probabilities as numbers for functions, in attributes named after dropout. That a
    family's denoiser draws nothing where this says so is tested for each.
    """
    return any(probability > 0 for module in model.modules() for probability in _probabilities(module))


def _probabilities(module: nn.Module) -> Iterator[float]:
    if isinstance(module, _DropoutNd):
        yield module.p
    for name, value in vars(module).items():
        if "drop" in name:
            yield from _numbers(value)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, dict):  # PEFT's, by adapter
        for inner in value.values():
            yield from _numbers(inner)
