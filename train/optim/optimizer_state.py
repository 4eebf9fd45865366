"""The state of an optimizer from step to step, as tensors `KIND/PARAMETER`, and `KIND/group-N` for a group's numbers.

Python's numbers are 64-bit scalars, which no optimizer here keeps as tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prep.loader.device import to_device
from train.optim.optimizers import OptimizerSpec

DTYPES = {"F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}
_NUMBERS = {int: torch.int64, float: torch.float64}


def tensors_of(spec: OptimizerSpec, optimizer: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of `optimizer`. A parameter that never had a gradient has none."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter)
        for kind, (dtype, shape) in spec.state(tuple(parameter.shape)).items() if state else ():
            value = torch.as_tensor(state[kind], dtype=DTYPES[dtype])
            tensors[f"{kind}/{name}"] = value.expand(shape)  # Prodigy keeps a zero for weights that are all zero
    for at, group in enumerate(optimizer.param_groups):
        for kind, number in spec.numbers.items():
            tensors[f"{kind}/group-{at}"] = torch.tensor(group[kind], dtype=_NUMBERS[number])
    return tensors


def expected(spec: OptimizerSpec, optimizer: Any, parameters: Mapping[str, Tensor], names: set[str],
             ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that a file with these `names` should have: for each parameter all or none, and the numbers of all
    groups. It may have only these, if float16 overflowed in every step."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, parameter in parameters.items():
        kinds = spec.state(tuple(parameter.shape))
        if any(f"{kind}/{name}" in names for kind in kinds):
            tensors |= {f"{kind}/{name}": (DTYPES[dtype], shape) for kind, (dtype, shape) in kinds.items()}
    numbers = {f"{kind}/group-{at}": (_NUMBERS[number], ()) for at in range(len(optimizer.param_groups))
               for kind, number in spec.numbers.items()}
    return tensors | numbers if tensors or numbers.keys() & names else tensors


def put(spec: OptimizerSpec, optimizer: Any, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Gives `optimizer` the state that `tensors_of` returned, bit by bit."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for at, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            name = names[id(parameter)]
            state = {kind: values[f"{kind}/{name}"] for kind in spec.state(tuple(parameter.shape))
                     if f"{kind}/{name}" in values}
            if state and hasattr(optimizer, "init_state"):  # bitsandbytes: tables, and memory that may be paged
                _fill(optimizer, group, parameter, (at, number), state)
            elif state:
                optimizer.state[parameter] = {kind: _placed(kind, value, parameter, group)
                                              for kind, value in state.items()}
        for kind in spec.numbers:
            if f"{kind}/group-{at}" in values:
                group[kind] = values[f"{kind}/group-{at}"].item()


def _fill(optimizer: Any, group: Any, parameter: Tensor, at: tuple[int, int], values: Mapping[str, Tensor]) -> None:
    optimizer.init_state(group, parameter, *at)
    state = optimizer.state[parameter]
    for kind, value in values.items():
        if isinstance(state[kind], Tensor):
            state[kind].copy_(to_device(value, state[kind].device))
        else:
            state[kind] = value.item()


def _placed(kind: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A value where the optimizer expects it: AdamW counts steps on the CPU, unless it is fused."""
    if value.dtype == torch.int64:
        return value.item()
    return value if kind == "step" and not group.get("fused") else to_device(value, parameter.device)
