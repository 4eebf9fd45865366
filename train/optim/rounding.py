"""Stochastic rounding to bfloat16: up or down by chance, so that the mean is the number itself.

An update is often smaller than half of the step between two numbers of bfloat16, which has 8 bits: rounded to the
nearest one, it would be lost each time (Gupta et al. 2015; Zamirai et al. 2020, section 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from prep.batching.rng import draw_key

LARGEST = torch.finfo(torch.bfloat16).max
_LOWER = 1 << 16  # how many values the lower half of a float32 has, which bfloat16 lacks


class Rounding:
    """The random bits of a run's updates: keyed by its seed, the step and the parameter's name, so that they are the
    same after a resume, and in whatever order parameters are updated. Other kinds of devices have other ones."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._generator = seed, torch.Generator(device)

    def put(self, target: Tensor, values: Tensor, name: str, step: int) -> None:
        """Rounds `values`, float32, into `target`, bfloat16, in step `step` (from 0) of the parameter `name`."""
        self._generator.manual_seed(draw_key(self._seed, step, name.encode(), 0, "rounding")[0])
        target.copy_(rounded(values, self._generator))


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """`values`, float32, in bfloat16: of the two numbers next to each the upper one with the probability of its place
    between them. What is beyond the largest number becomes that, not infinite; infinite and NaN stay so.

    A number's bits are its sign and, counted up from 0, its place among all magnitudes: a random number below 2¹⁶ is
    added to them, and the lower half cut off.
    """
    count = values.numel()
    drawn = torch.empty(-(-count // 4), dtype=torch.int64, device=values.device)  # four at once: fewer calls
    drawn.random_(torch.iinfo(torch.int64).min, None, generator=generator)
    added = drawn.view(torch.int16)[:count].view(values.shape)
    added.masked_fill_(values.abs() >= LARGEST, -_LOWER // 2)  # adds 0
    bits = values.view(torch.int32).add(added).add_(_LOWER // 2)
    upper = bits.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    return upper.masked_fill_(values.isnan(), torch.nan)
