"""Gradient checkpointing: what blocks compute is not kept for the backward pass, but computed again there.

What a block is given waits on the device, or in host memory if it is large. Such copies go through the stream that
computes, in whose order memory is given away and taken: so nothing waits for them, and nothing is overwritten early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from prep.models.device.offload import SHARED
from prep.training.checks import IN_HOST
from prep.training.schema import Config

LEAST = 1 << 20  # bytes of a tensor that goes to host memory

Kept = Tensor | tuple[torch.device, Tensor]  # what waits for the backward pass, with where it was


def recomputed(block: Callable[..., Any], *args: Any) -> Any:
    """What a block returns, with gradient checkpointing as diffusers does it."""
    return checkpoint(block, *args, use_reentrant=False)


def recomputed_from_host(block: Callable[..., Any], *args: Any) -> Any:
    """The same, where large tensors that the block is given wait in host memory for the backward pass.

    The hooks see nothing else: within the block, those of gradient checkpointing come before them.
    """
    with saved_tensors_hooks(to_host, from_host):
        return recomputed(block, *args)


def way_of(config: Config, device: torch.device) -> Callable[..., Any]:
    """How a run calls recomputed blocks on a device."""
    in_host = config.gradient_checkpointing == IN_HOST and device.type not in SHARED
    return recomputed_from_host if in_host else recomputed


def to_host(value: Tensor) -> Kept:
    """A copy in host memory with the device, or the tensor itself if it is small."""
    if value.nbytes < LEAST:
        return value
    pinned = value.device.type == "cuda"
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned) if pinned else None
    return value.device, value.to("cpu", copy=True) if host is None else host.copy_(value, non_blocking=True)


def from_host(kept: Kept) -> Tensor:
    """What `to_host` was given."""
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)
