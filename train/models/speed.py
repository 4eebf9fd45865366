"""Settings that make a denoiser faster and its numbers differ in the last digits; the steps stay the same."""

from __future__ import annotations

from typing import Any

import torch

from prep.training.schema import Config


def speed_up(model: Any, config: Config, device: torch.device) -> None:
    """Applies tf32, channels_last and compile to a loaded denoiser, in place."""
    if config.tf32 and device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True  # cuDNN's convolutions use TF32 by default
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.compile:
        _compile(model)


def _compile(model: Any) -> None:
    """Compiles each repeated block, as its class in diffusers names them, else the whole. Modules keep their names.

    Compilation itself begins with the first forward pass; the largest bucket is tried before step 1.
    """
    names = set(getattr(model, "_repeated_blocks", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    for module in blocks or [model]:
        module.compile()
