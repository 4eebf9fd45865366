"""Compares a cached latent with what a VAE makes of the picture, by numbers alone.

The VAE says of each number x of a latent that it is drawn from a normal distribution of mean m and deviation s. Caches
are made with other filters of scaling and in half precision, perhaps of a picture that was saved again since, so x is
allowed a further deviation, a part of that of all the means within a channel:

    z² = (x - m)² / mean of (s² + (SPREAD · deviation of the means)²)

has an average of at most 1. With the demo's VAE and 24 photos, latents of pictures that were scaled by averaging or
bilinearly, or encoded in bfloat16, deviate by at most 0.03 of the means' deviation; saved as JPEG of quality 85, by
0.05 (median); scaled by 3 % more, by 0.28 to 0.79; moved by one cell, mirrored, or multiplied by a scaling factor, by
more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from prep.cache.values import Values

SPREAD = 0.25
ERRORS = 6  # standard errors of the average of z² that are allowed beyond 1
Verdict = Literal["fits", "unclear", "differs"]  # unclear: it fits, but the mirrored picture's would fit, too


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentComparison:
    """The comparison of a latent with a posterior."""

    verdict: Verdict
    deviation: float  # of the latent from the means, beyond s, as a part of the deviation of the means
    why: str = ""  # of a latent that differs


def compare(latent_Chw: Values, mean_Chw: Values, std_Chw: Values) -> LatentComparison:
    """Compares a latent with the posterior that a VAE has for the picture; float32 arrays."""
    latent, mean, std = (values.astype(np.float64) for values in (latent_Chw, mean_Chw, std_Chw))
    spread = mean.var(axis=(1, 2)).mean()
    excess = max(float(((latent - mean) ** 2 - std ** 2).mean()), 0.0)
    deviation = float(np.sqrt(excess / spread)) if spread else 0.0
    mirrored = _fits(latent, mean[..., ::-1], std[..., ::-1])
    if _fits(latent, mean, std):
        return LatentComparison(verdict="unclear" if mirrored else "fits", deviation=deviation)
    if mirrored:
        return LatentComparison(verdict="differs", deviation=deviation, why="it is that of the mirrored picture")
    scale, shift = np.polyfit(mean.ravel(), latent.ravel(), 1) if spread else (1.0, 0.0)
    if scale > 0 and _fits((latent - shift) / scale, mean, std):
        offset = f", moved by {shift:.3f}" if abs(shift) > 0.01 * np.sqrt(spread) * scale else ""
        return LatentComparison(verdict="differs", deviation=deviation, why=f"it is multiplied by {scale:.3f}{offset}")
    return LatentComparison(verdict="differs", deviation=deviation, why="it is of another VAE, crop or picture")


def _fits(latent: Values, mean: Values, std: Values) -> bool:
    """Whether the latent may be drawn from this posterior, but for what caches are allowed to differ by."""
    allowed = (std ** 2).mean() + SPREAD ** 2 * mean.var(axis=(1, 2)).mean()
    average = ((latent - mean) ** 2).mean()
    return bool(average <= allowed * (1 + ERRORS * np.sqrt(2 / latent.size)))
