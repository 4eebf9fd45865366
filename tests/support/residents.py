"""Which blocks of a denoiser have weights each time that one is needed, and which had to be waited for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from train.models.lora import is_stored
from train.models.offload import Offloaded


def watch_residents(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """For each time that an offloaded block is about to compute: how many such blocks have frozen weights, and whether
    its own were there before."""
    found: list[tuple[int, bool]] = []
    real = Offloaded._bring

    def bring(self: Offloaded, block: Any) -> None:
        there = block.buffer is not None
        real(self, block)
        found.append((sum(map(has_weights, self.modules)), there))

    monkeypatch.setattr(Offloaded, "_bring", bring)
    return found


def has_weights(module: nn.Module) -> bool:
    """Whether any weight of a block has numbers, beside those of adapters."""
    return any(value.numel() for name, value in module.named_parameters()
               if not value.requires_grad and not is_stored(name))
