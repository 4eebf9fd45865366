"""Moves tensors and models between devices; no other module does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; copies from pinned memory to CUDA are asynchronous."""
    return tensor.to(device, non_blocking=device.type == "cuda" and tensor.is_pinned())


def record_copies(device: torch.device) -> torch.cuda.Event | None:
    """An event that completes when all copies issued so far have; `None` if the device copies synchronously."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # another GPU's stream would not wait for these copies
    return event


class Arriving:
    """Copies of tensors on their way to host memory: from a CUDA GPU they come while it does later work."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [value.detach().to("cpu", non_blocking=value.is_cuda) for value in tensors]
        devices = [value.device for value in tensors if value.is_cuda]
        self._event = record_copies(devices[0]) if devices else None

    def wait(self) -> list[Tensor]:
        """Waits for the tensors and returns them; does not wait for work that was begun after them."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def module_to_device(model: M, device: torch.device) -> M:
    """Moves the weights of `model` to `device`, in place."""
    return model.to(device)


def seed(number: int, device: torch.device) -> None:
    """Seeds the generators of the CPU and of `device`: the numbers of `torch.manual_seed`, without its millisecond."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        place = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[place].manual_seed(number)
    elif device.type == "mps":
        torch.mps.manual_seed(number)


def to_host(tensor: Tensor) -> Tensor:
    """`tensor` in host memory, detached, for writing to a file."""
    return tensor.detach().to("cpu")


def copied_to_host(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in host memory, detached: it stays as it is when the other one changes."""
    return tensor.detach().to("cpu", copy=True)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass; `auto` is bfloat16 if the GPU supports it natively, else float32."""
    if precision == "auto":
        has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_it else torch.float32
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Mixed precision for bfloat16 and float16; nothing for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
