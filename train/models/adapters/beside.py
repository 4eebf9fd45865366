"""Adds a training adapter to the layers of a denoiser, and switches it off for sample pictures.

A layer's part of it is a module of its own, called by a hook after the layer and whatever else adapts that: so it goes
with bases and adapters of any kind. What a layer returns while it is off is what it returns without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from prep.models.checkpoints.streaming import Keep
from train.models.adapters.frozen import FrozenAdapter, FrozenLayer
from train.models.naming import in_file_order

_NAME = "training_adapter"  # of the module within its layer


class Beside(nn.Module):
    """Adds the product of two frozen matrices and a layer's input to its output, unless it is off."""

    def __init__(self, layer: Any, down: Tensor, up: Tensor) -> None:
        """`down`: `[rank, in]`, `up`: `[out, rank]`; of a convolution its kernels, and those of one by 1x1."""
        super().__init__()
        self.on = True
        self.down, self.up = (nn.Parameter(value, requires_grad=False) for value in (down, up))
        self._steps = {} if down.ndim == 2 else {
            "stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}

    def forward(self, inputs: Tensor, output: Tensor) -> Tensor:
        """The layer's output, with what is added."""
        if not self.on:
            return output
        product: Any = functional.linear if self.down.ndim == 2 else functional.conv2d
        added: Tensor = product(product(inputs.to(self.down.dtype), self.down, **self._steps), self.up)
        return output + added.to(output.dtype)


def attach_beside(denoiser: nn.Module, dtype: torch.dtype, adapter: FrozenAdapter, tensors: Mapping[str, Tensor],
                  keep: Keep | None = None) -> None:
    """Adds the adapter, whose file has these `tensors`, to the layers of `denoiser`, in `dtype`. `keep` is given each
    of its parameters, as it is those of the base."""
    for name, part in adapter.layers.items():
        layer = denoiser.get_submodule(name)
        values = dict(zip(("down", "up"), _matrices(getattr(layer, "base_layer", layer), part, tensors), strict=True))
        for kind, value in values.items():
            values[kind] = value.to(dtype) if keep is None else keep(f"{name}.{_NAME}.{kind}", value.to(dtype))
        layer.add_module(_NAME, Beside(getattr(layer, "base_layer", layer), **values))
        layer.register_forward_hook(_add)


def _add(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
    return getattr(layer, _NAME)(inputs[0], output)


def _matrices(layer: Any, part: FrozenLayer, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`down` and `up` of one layer in float32, `up` with the scale, of the shapes that `Beside` takes."""
    down, up, where = tensors[part.down].float(), tensors[part.up].float().flatten(1), part.where
    unit = len(up) // where.of
    rows = slice(where.first * unit, (where.first + where.count) * unit)
    up = part.scale * in_file_order(where, up, down, up)[rows]
    if isinstance(layer, nn.Linear):
        return down.flatten(1), up
    return down.reshape(len(down), -1, *layer.kernel_size), up[:, :, None, None]


@contextmanager
def switched_off(denoiser: nn.Module) -> Iterator[None]:
    """The denoiser without its training adapter inside the `with` block."""
    parts = [module for module in denoiser.modules() if isinstance(module, Beside)]
    try:
        for part in parts:
            part.on = False
        yield
    finally:
        for part in parts:
            part.on = True
