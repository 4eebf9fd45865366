"""What an optimizer keeps from step to step, as tensors `KIND/PARAMETER`, and `KIND/group-N` for a group's numbers.

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
    """What `optimizer` keeps. A parameter that never had a gradient has nothing."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter)
        for kind, (dtype, shape) in spec.kept(tuple(parameter.shape)).items() if state else ():
            value = torch.as_tensor(state[kind], dtype=DTYPES[dtype])
            found[f"{kind}/{name}"] = value.expand(shape)  # Prodigy keeps a zero for weights that are all zero
    for at, group in enumerate(optimizer.param_groups):
        for kind, number in spec.numbers.items():
            found[f"{kind}/group-{at}"] = torch.tensor(group[kind], dtype=_NUMBERS[number])
    return found


def expected(spec: OptimizerSpec, optimizer: Any, parameters: Mapping[str, Tensor], there: set[str],
             ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that a file should have whose names are `there`: for each parameter all or none, and the numbers of
    all groups. It may have only these, if float16 overflowed in every step."""
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, parameter in parameters.items():
        kept = spec.kept(tuple(parameter.shape))
        if any(f"{kind}/{name}" in there for kind in kept):
            wanted |= {f"{kind}/{name}": (DTYPES[dtype], shape) for kind, (dtype, shape) in kept.items()}
    numbers = {f"{kind}/group-{at}": (_NUMBERS[number], ()) for at in range(len(optimizer.param_groups))
               for kind, number in spec.numbers.items()}
    return wanted | numbers if wanted or numbers.keys() & there else wanted


def put(spec: OptimizerSpec, optimizer: Any, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Gives `optimizer` what `tensors_of` found, bit by bit."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for at, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            name = names[id(parameter)]
            kept = {kind: values[f"{kind}/{name}"] for kind in spec.kept(tuple(parameter.shape))
                    if f"{kind}/{name}" in values}
            if kept and hasattr(optimizer, "init_state"):  # bitsandbytes: tables, and memory that may be paged
                _fill(optimizer, group, parameter, (at, number), kept)
            elif kept:
                optimizer.state[parameter] = {kind: _placed(kind, value, parameter, group)
                                              for kind, value in kept.items()}
        for kind in spec.numbers:
            if f"{kind}/group-{at}" in values:
                group[kind] = values[f"{kind}/group-{at}"].item()


def _fill(optimizer: Any, group: Any, parameter: Tensor, at: tuple[int, int], kept: Mapping[str, Tensor]) -> None:
    optimizer.init_state(group, parameter, *at)
    state = optimizer.state[parameter]
    for kind, value in kept.items():
        if isinstance(state[kind], Tensor):
            state[kind].copy_(to_device(value, state[kind].device))
        else:
            state[kind] = value.item()


def _placed(kind: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A value where the optimizer expects it: AdamW counts steps on the CPU, unless it is fused."""
    if value.dtype == torch.int64:
        return value.item()
    return value if kind == "step" and not group.get("fused") else to_device(value, parameter.device)
