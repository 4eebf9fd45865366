"""Divides a model among ranks by PyTorch's FSDP2 (`fully_shard`, imported only here). Gradients become sums over the
ranks, never means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_map_only

from prep.errors import ConfigError, first_line


def divide(model: nn.Module, device: torch.device, rows: dict[str, Tensor] | None = None) -> None:
    """Divides the parameters of `model` among the ranks, on `device`; the model is in host memory before.

    `rows`, which this empties: the values that this rank has of each parameter, by names before adapters were added;
    the parameters are then on the meta device before. `None`: they have their values.

    Its blocks are those that diffusers does not split over devices, else the members of its lists of modules. Raises
    `ConfigError`.
    """
    mesh = init_device_mesh(device.type, (get_world_size(),))
    try:
        for module in (*_blocks(model), model):
            module.register_forward_hook(_without_views)
            # Always: weights that stayed whole after an evaluation would miss the next update.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"the model cannot be divided among processes: {first_line(error)}",
                          hint="--no-shard") from None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if rows is not None:
        _fill(model, device, rows)


def _fill(model: nn.Module, device: torch.device, rows: dict[str, Tensor]) -> None:
    """Gives the parameters memory on the device, and their values."""
    buffers = [(module._buffers, name, value) for module in model.modules() for name, value in module._buffers.items()]
    model.to_empty(device=device)
    for values, name, value in buffers:  # which had theirs
        values[name] = value
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            divided: Any = parameter  # a DTensor, which torch types as a parameter
            divided.to_local().copy_(rows.pop(name.replace(".base_layer.", ".")))
    assert not rows, "the model lacks some of its parameters"


def _without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """The output in memory of its own: were it a view that the model then changes in place, autograd would pass by
    FSDP's hook on it, which gathers the weights for the backward pass."""
    return tree_map_only(torch.Tensor, lambda value: value.clone() if value._is_view() else value, output)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules whose weights are gathered together, inner ones first."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names and module is not model]
    if not blocks:
        blocks = [block for each in model.children() if isinstance(each, nn.ModuleList) for block in each]
    return blocks[::-1]
