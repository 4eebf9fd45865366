"""One parameter at a time: updated by the optimizer of all, within the backward pass or after it.

Parameters in bfloat16 are float32 while they are updated, as the optimizer keeps its numbers for them, and are rounded
stochastically then. So there is one of them in float32 at a time, and no copy of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from train.optim.rounding import Rounding

Parameters = Mapping[str, nn.Parameter]


class Singly:
    """An optimizer whose updates of one parameter depend on no other one, used for one at a time."""

    def __init__(self, optimizer: Any, parameters: Parameters, seed: int) -> None:
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        numbers = {id(value): number for number, (_, values) in enumerate(groups) for value in values}
        self._optimizer, self._groups = optimizer, groups
        self._group_of = {name: numbers[id(value)] for name, value in parameters.items()}
        self._rounding = Rounding(seed, next(iter(parameters.values())).device)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within it, the optimizer has no parameter but the one that `update` gives it."""
        for group, _ in self._groups:
            group["params"] = []
        try:
            yield
        finally:
            for group, values in self._groups:
                group["params"] = values

    @torch.no_grad()
    def update(self, name: str, value: nn.Parameter, step: int) -> None:
        """Moves the parameter `name` by its gradient in step `step` (from 0), and frees that. Within `apart`."""
        group, _ = self._groups[self._group_of[name]]
        group["params"] = [value]
        if value.dtype == torch.float32:
            self._optimizer.step()
        else:
            self._update_rounded(name, value, step)
        group["params"], value.grad = [], None

    def _update_rounded(self, name: str, value: nn.Parameter, step: int) -> None:
        """The same of a parameter in bfloat16, which stays where it is in memory, also after an error."""
        own, grad = value.data, value.grad
        assert grad is not None, "a gradient to update by"
        value.grad = None
        try:
            value.data = own.float()
            value.grad = grad.float()
            del grad
            self._optimizer.step()
            self._rounding.put(own, value.data, name, step)
        finally:
            value.grad, value.data = None, own


@contextmanager
def at_gradients(parameters: Parameters, call: Callable[[str, nn.Parameter], None]) -> Iterator[None]:
    """Within it, a backward pass calls `call` with each parameter and its name as soon as its gradient is whole."""
    def called(name: str, value: Tensor) -> None:
        assert isinstance(value, nn.Parameter)
        call(name, value)

    hooks = []
    for name, each in parameters.items():
        parameter: Any = each  # whose method torch does not type
        hooks.append(parameter.register_post_accumulate_grad_hook(partial(called, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
