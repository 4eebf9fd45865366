"""Draws the timestep of a showing: a function of its random stream.

Timesteps are numbered from the least noise to the most. t is a timestep's place among them, from 0 to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prep.training.schema import Distribution

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Timesteps:
    """A distribution over the timesteps of a noise schedule."""

    distribution: Distribution = "uniform"
    mean: float = 0.0  # of logit-normal
    std: float = 1.0  # of logit-normal
    mode_scale: float = 1.29  # of mode
    shift: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def draw(self, stream: np.random.Generator, count: int) -> int:
        """One of 0 to `count` - 1."""
        if self is UNIFORM or self == UNIFORM:
            return int(stream.integers(count))
        place = shifted(self._place(stream), self.shift)
        return min(int((self.low + (self.high - self.low) * place) * count), count - 1)

    def _place(self, stream: np.random.Generator) -> float:
        if self.distribution == "logit-normal":
            return logistic(self.mean + self.std * stream.standard_normal())
        value = stream.random()
        return value if self.distribution == "uniform" else mode(value, self.mode_scale)


UNIFORM = Timesteps()


def logistic(value: float) -> float:
    """Logit-normal t for a normal value (Esser et al. 2024, equation 19)."""
    return 1 / (1 + math.exp(-value))


def mode(value: float, scale: float) -> float:
    """t with its mode in the middle for a uniform value and a positive `scale` (Esser et al. 2024, equation 20)."""
    return 1 - value - scale * (math.cos(math.pi / 2 * value) ** 2 - 1 + value)


def shifted(place: float, shift: float) -> float:
    """t moved toward more noise, for a `shift` above 1 (Esser et al. 2024, equation 23, with shift = sqrt(m / n))."""
    return shift * place / (1 + (shift - 1) * place)
