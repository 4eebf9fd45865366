"""A training adapter: a LoRA beside the base that trains along with it, never changes, and is no part of the result.

For models distilled to few steps such LoRAs are published (ostris/zimage_turbo_training_adapter): they take the
distillation away for the time of training, so that what is learned serves the distilled model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prep.models.lora.kohya import LayerSlice
from train.models.targets import Shapes

PART = "training adapter"  # among the fingerprints of a run's base


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenLayer:
    """What it adds to a layer of the denoiser: scale x up @ down."""

    where: LayerSlice  # the layer's rows among those of `up`
    down: str  # names of tensors in the file
    up: str
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenAdapter:
    """A training adapter before its values are read."""

    path: Path
    digest: str  # SHA-256 of the file
    shapes: Shapes  # of the file's tensors
    layers: Mapping[str, FrozenLayer]  # by the layer's name
    notes: tuple[str, ...]  # what is worth knowing about the file


def fingerprints(adapter: FrozenAdapter | None) -> dict[str, str]:
    """What it adds to the fingerprints of a run's base."""
    return {} if adapter is None else {PART: adapter.digest}
