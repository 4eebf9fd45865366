"""The objective of a slider: what the base predicts for two prompts differs, and adapters add that, or take it away.

Concept sliders of Gandikota et al. (2023, equation 7), with both directions in each micro-batch as ai-toolkit trains
them, and with noisy pictures of the data set instead of such that the model itself begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prep.models.family import Conditions, TextArrays
from train.models.denoiser import Denoiser, predict
from train.models.lora import without_adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class Slide:
    """The text rows of a slider, `[2 or 3, …]` by array: positive, negative, and neutral unless captions are that."""

    text: TextArrays
    strength: float

    def asked(self, conditions: Conditions) -> Conditions:
        """The conditions with the prompt whose pictures move."""
        return self._with(2, conditions) if len(next(iter(self.text.values()))) > 2 else conditions

    @torch.no_grad()
    def targets(self, denoiser: Denoiser, noised_BChw: Tensor, timestep_B: Tensor, conditions: Conditions
                ) -> tuple[Tensor, Tensor]:
        """What the base predicts under `conditions`, and the target at weight 1, float32 `[B, C, h, w]` each; that at
        weight -1 is as far on the other side of the first."""
        with without_adapters(denoiser.model):
            positive_BChw, negative_BChw, neutral_BChw = (
                predict(denoiser, noised_BChw, timestep_B, each).float()
                for each in (self._with(0, conditions), self._with(1, conditions), conditions))
        return neutral_BChw, neutral_BChw + self.strength * (positive_BChw - negative_BChw)

    def _with(self, row: int, conditions: Conditions) -> Conditions:
        count = len(next(iter(conditions.text.values())))
        return replace(conditions, text={name: value[row:row + 1].expand(count, *value.shape[1:])
                                         for name, value in self.text.items()})
