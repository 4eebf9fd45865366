"""Tensors of LoRA files that tests make, and what such a file says of itself."""

from __future__ import annotations

import torch
from safetensors import safe_open

DOWN, UP = ".lora_down.weight", ".lora_up.weight"


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()
