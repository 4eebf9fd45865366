"""Settings that make a denoiser faster and its numbers differ in the last digits; the steps stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from prep.errors import ConfigError, first_line
from prep.training.schema import Attention, Config


def speed_up(model: Any, config: Config, device: torch.device) -> None:
    """Applies tf32, channels_last, attention and compile to a loaded denoiser, in place. Raises `ConfigError`."""
    if config.tf32 and device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True  # cuDNN's convolutions use TF32 by default
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.attention != "native":
        _choose_attention(model, config.attention)
    if config.compile:
        _compile(model)


# Names in diffusers. Its SageAttention is not among them: it has no backward pass.
_KERNELS: Mapping[Attention, str] = {"cudnn": "_native_cudnn", "flash": "flash", "flash-3": "_flash_3",
                                     "xformers": "xformers"}


def _choose_attention(model: Any, name: Attention) -> None:
    """Raises `ConfigError` if its package is not installed, or too old."""
    try:
        model.set_attention_backend(_KERNELS[name])
    except RuntimeError as error:
        raise ConfigError(f"attention is '{name}': {first_line(error)}", hint="--set attention=native") from None


def _compile(model: Any) -> None:
    """Compiles each repeated block, as its class in diffusers names them, else the whole. Modules keep their names.

    Compilation itself begins with the first forward pass; the largest bucket is tried before step 1.
    """
    names = set(getattr(model, "_repeated_blocks", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    for module in blocks or [model]:
        module.compile()
