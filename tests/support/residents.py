"""Which blocks of a denoiser have weights each time that one is needed, and which had to be waited for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from train.models import recomputed
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


def watch_inputs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each tensor that goes to host memory until its block is recomputed. Small ones go, too, and so does
    what a CPU has."""
    found: list[int] = []
    real = recomputed.to_host

    def to_host(value: Tensor) -> Any:
        found.append(value.nbytes)
        return real(value)

    monkeypatch.setattr(recomputed, "to_host", to_host)
    monkeypatch.setattr(recomputed, "LEAST", 1)
    monkeypatch.setattr(recomputed, "SHARED", ())
    return found


def has_weights(module: nn.Module) -> bool:
    """Whether any weight of a block has numbers, beside those of adapters."""
    return any(value.numel() for name, value in module.named_parameters()
               if not value.requires_grad and not is_stored(name))
