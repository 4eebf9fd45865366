"""The noise of a showing: normal, or with what training mixes into it. Each part has a random stream of its own.

C latent channels, h w latent cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from prep.batching.rng import philox

Array = np.ndarray[Any, np.dtype[np.float32]]
BASE, OFFSET, PYRAMID, PERTURBATION = range(4)  # streams of a showing's key


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The settings of noise: what is mixed into it."""

    offset: float = 0.0
    pyramid: float = 0.0
    pyramid_levels: int = 10
    perturbation: float = 0.0

    def draw(self, key: tuple[int, int], out_Chw: Array) -> None:
        """The noise that a latent is mixed with, into `out_Chw`."""
        philox(key, BASE).standard_normal(out=out_Chw, dtype=np.float32)
        if self.offset:
            add_offset(philox(key, OFFSET), out_Chw, self.offset)
        if self.pyramid:
            add_pyramid(philox(key, PYRAMID), out_Chw, self.pyramid, self.pyramid_levels)

    def perturb(self, key: tuple[int, int], noise_Chw: Array, out_Chw: Array) -> None:
        """The noise in the model's input, into `out_Chw`: `noise_Chw`, which is the target's, and a little more.

        (Ning et al. 2023, Input Perturbation Reduces Exposure Bias in Diffusion Models, algorithm 1)
        """
        philox(key, PERTURBATION).standard_normal(out=out_Chw, dtype=np.float32)
        out_Chw *= np.float32(self.perturbation)
        out_Chw += noise_Chw


PLAIN = Noise()


def add_offset(stream: np.random.Generator, noise_Chw: Array, strength: float) -> None:
    """Adds a normal number times `strength` to each channel: e'[c, y, x] = e[c, y, x] + strength · d[c], d ~ N(0, 1).

    (Guttenberg 2023, Diffusion with Offset Noise, where it is `randn_like(latents) + 0.1 * randn(b, c, 1, 1)`)
    """
    noise_Chw += np.float32(strength) * stream.standard_normal((len(noise_Chw), 1, 1), dtype=np.float32)


def add_pyramid(stream: np.random.Generator, noise_Chw: Array, discount: float, levels: int) -> None:
    """Adds noise of lower and lower resolution, times discount^level, and divides by the standard deviation:

        e' = s / std(s),   s = e + sum over i of discount^i · enlarge(n_i),   n_i ~ N(0, 1) of h / r_i^i by w / r_i^i

    (Whitaker 2023, Multi-Resolution Noise for Diffusion Model Training.) Level 0 has the latent's size. The sides of a
    level are those of the latent divided by r^level, with r drawn from 2 to 4 for each, as in sd-scripts; Whitaker's
    own code divides the sides of the level before. The last level is one cell high or wide. The deviation is that of
    the sample, not that of its batch: its noise does not depend on other samples.
    """
    channels, *sides = noise_Chw.shape
    for level in range(levels):
        ratio = (2 + 2 * stream.random()) ** level
        height, width = (max(1, int(side / ratio)) for side in sides)
        coarse = stream.standard_normal((channels, height, width), dtype=np.float32)
        noise_Chw += np.float32(discount**level) * enlarged(enlarged(coarse, 1, sides[0]), 2, sides[1])
        if 1 in (height, width):
            break
    noise_Chw /= np.float32(noise_Chw.std(dtype=np.float64, ddof=1))


def enlarged(values: Array, axis: int, count: int) -> Array:
    """`values` with `count` cells along `axis`, by linear interpolation between the centers of cells."""
    length = values.shape[axis]
    place = np.clip((np.arange(count) + 0.5) * (length / count) - 0.5, 0, length - 1)
    low = place.astype(np.intp)
    high = np.minimum(low + 1, length - 1)
    part = (place - low).astype(np.float32).reshape(-1, *(1 for _ in values.shape[axis + 1 :]))
    result: Array = values.take(low, axis) * (1 - part) + values.take(high, axis) * part
    return result
