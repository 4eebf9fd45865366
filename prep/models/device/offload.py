"""Decides which encoders lie on the device whole, and which in host memory, from which each layer comes for its turn.

The values are the same; layers that come one by one take the time of copying all weights for each batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from prep.formatting import format_bytes
from prep.models.device.memory import move

SHARED = ("cpu", "mps")  # devices whose memory is the host's


class EncoderPlacement:
    """Places encoders on a device with at most `memory` bytes for their weights; `None`: no limit."""

    def __init__(self, device: torch.device, memory: int | None, compute: str) -> None:
        self.device, self._memory, self._compute = device, memory, compute
        self._notices: dict[str, None] = {}
        if memory is not None and device.type in SHARED:
            self._notices[f"--encoder-memory does nothing on {device.type}, whose memory is that of the computer: the "
                          "text encoders lie in it whole, one at a time"] = None

    @property
    def notices(self) -> Iterable[str]:
        """What a user should know of where encoders are."""
        return self._notices

    def place(self, encoder: Any, name: str) -> Any:
        """`encoder` itself, ready for inputs on the device; `name` is for messages. Raises `OutOfMemoryError`."""
        size = weight_bytes(encoder)
        if self._memory is None or self.device.type in SHARED or size <= self._memory:
            return move(encoder, self.device, "the text encoder", self._compute, offload=True)
        compute_on(encoder, self.device)
        self._notices[f"the {name} ({format_bytes(size)}) is larger than --encoder-memory, so its layers are copied to "
                      f"{self.device} one by one"] = None
        return encoder


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights and buffers, and of the scales of quantized weights."""
    return sum(tensor.nbytes + _scale_bytes(tensor) for tensor in chain(module.parameters(), module.buffers()))


def _scale_bytes(weight: Tensor) -> int:
    """Bytes of the scales that bitsandbytes keeps beside a quantized weight."""
    scales = (getattr(getattr(weight, "quant_state", None), "absmax", None), getattr(weight, "SCB", None))
    return sum(scale.nbytes for scale in scales if scale is not None)


def compute_on(module: nn.Module, device: torch.device) -> None:
    """Lets a module in host memory compute on `device`: each layer's weights are copied there while it computes."""
    for part in module.modules():
        if part._parameters or part._buffers:
            layer = _Layer(part, device)
            part.register_forward_pre_hook(layer.bring)
            part.register_forward_hook(layer.drop, always_call=True)  # also if it raises: memory may not suffice
    module.register_forward_pre_hook(
        lambda _, args, kwargs: tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf,
                                         (args, kwargs)), with_kwargs=True)


class _Layer:
    """The weights of one module: those in host memory, while it has copies of them."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._parameters: Mapping[str, nn.Parameter | None] = {}
        self._buffers: Mapping[str, Tensor | None] = {}

    def bring(self, *_: Any) -> None:
        """Gives the module copies on the device."""
        module = self._module
        self._parameters, self._buffers = dict(module._parameters), dict(module._buffers)
        for name, weight in self._parameters.items():
            if weight is not None:
                module._parameters[name] = _copied(weight, self._device)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(self._device)

    def drop(self, *_: Any) -> None:
        """Gives it back its own."""
        self._module._parameters.update(self._parameters)
        self._module._buffers.update(self._buffers)
        state: Any = getattr(self._module, "state", None)
        if hasattr(state, "SCB"):  # of a layer of bitsandbytes with weights of 8 bits, which refers to its copies
            state.CB = state.SCB = None


def _copied(weight: nn.Parameter, device: torch.device) -> Any:
    """A copy on the device; of a quantized weight, with its scales."""
    if type(weight) is not nn.Parameter:
        return deepcopy(weight).to(device)  # its own `to` would move the scales of the original
    return nn.Parameter(weight.detach().to(device), requires_grad=False)
