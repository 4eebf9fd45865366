"""Mixed precision as it is on a GPU, for a model that is counted on the CPU.

A step without data runs on torch's CPU, whose autocast leaves to half precision some of what a GPU's computes in
float32, and keeps so for the backward pass.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

# Of `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE` in ATen/autocast_mode.h, what the CPU has not. By the names of
# Python's functions and methods: `interpolate` is all of `upsample_*`.
FLOAT32 = frozenset({
    "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "exp", "expm1", "log",
    "log10", "log1p", "log2", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt", "sum", "cumsum", "cumprod", "norm",
    "vector_norm", "softplus", "logsumexp", "interpolate", "cosine_similarity", "tan", "sinh", "cosh", "acos", "asin",
    "erfinv", "dist", "renorm"})


class OfGpu(TorchFunctionMode):
    """Within it, functions of `FLOAT32` get float32 where autocast is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _float32, (args, kwargs))
        return func(*args, **kwargs)


def recomputed(module: Any, *args: Any) -> Any:
    """Calls a block with gradient checkpointing, as diffusers does; torch itself leaves such modes out when it computes
    the block again."""
    return checkpoint(module.__call__, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), OfGpu()))


def _float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value
