"""The training loss: squared error of a denoiser's prediction, weighted by cell, sample and timestep.

B samples, C latent channels, h and w latent cells. Everything is float32. Functions return sums, not means: a step adds
them over its micro-batches and divides once, so gradients do not depend on how the step is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """A micro-batch's contribution to its step: loss = Σ error / Σ weight."""

    error: Tensor  # scalar with a gradient: Σ of weighted squared errors
    weight: Tensor  # scalar: number of elements, or Σ of their mask weights


def noised(kind: str, latent_BChw: Tensor, noise_BChw: Tensor, level_B: Tensor) -> Tensor:
    """The noisy latent at its noise level: the cumulative product of alphas (Ho et al. 2020, equation 4), or the sigma
    of a flow along straight paths (Lipman et al. 2023; Esser et al. 2024, equation 13)."""
    if kind == "flow":
        sigma = _spread(level_B, latent_BChw)
        return (1 - sigma) * latent_BChw + sigma * noise_BChw
    alpha = _spread(level_B, latent_BChw)
    return alpha.sqrt() * latent_BChw + (1 - alpha).sqrt() * noise_BChw


def target(kind: str, latent_BChw: Tensor, noise_BChw: Tensor, level_B: Tensor) -> Tensor:
    """The prediction target: the noise, the velocity (Salimans & Ho 2022, section 4), or that of a straight flow."""
    if kind == "epsilon":
        return noise_BChw
    if kind == "flow":
        return noise_BChw - latent_BChw
    assert kind == "v_prediction", kind
    alpha = _spread(level_B, latent_BChw)
    return alpha.sqrt() * noise_BChw - (1 - alpha).sqrt() * latent_BChw


def min_snr_weight(kind: str, alpha_B: Tensor, gamma: float) -> Tensor:
    """The min-SNR weight per timestep: Hang et al. 2023, equation 6, by kind of prediction; ones if gamma is 0."""
    if not gamma:
        return torch.ones_like(alpha_B)
    ratio = alpha_B / (1 - alpha_B)
    return ratio.clamp(max=gamma) / (ratio if kind == "epsilon" else ratio + 1)


def cell_weight(mask_B1hw: Tensor, unmasked_weight: float) -> Tensor:
    """1 where the mask is 1, `unmasked_weight` where it is 0, linear between."""
    return unmasked_weight + (1 - unmasked_weight) * mask_B1hw


def sums(predicted_BChw: Tensor, target_BChw: Tensor, *, weight_B1hw: Tensor | None, weight_B: Tensor,
         normalize_area: bool) -> Sums:
    """The sums of a micro-batch. `weight_B` scales each sample's error and is not part of the denominator."""
    squared_BChw = (predicted_BChw.float() - target_BChw).square()
    if weight_B1hw is None:
        weight_B1hw = torch.ones_like(squared_BChw[:, :1])
    error = (squared_BChw * weight_B1hw * _spread(weight_B, squared_BChw)).sum()
    per_cell = weight_B1hw if normalize_area else torch.ones_like(weight_B1hw)
    return Sums(error=error, weight=per_cell.sum() * squared_BChw.shape[1])


def per_sample(predicted_BChw: Tensor, target_BChw: Tensor, weight_B1hw: Tensor | None) -> Tensor:
    """Each sample's mean weighted squared error, `[B]`, as validation reports it."""
    squared_BChw = (predicted_BChw.float() - target_BChw).square()
    if weight_B1hw is not None:
        squared_BChw = squared_BChw * weight_B1hw
    return squared_BChw.mean(dim=(1, 2, 3))


def _spread(value_B: Tensor, like_BChw: Tensor) -> Tensor:
    return value_B.view(-1, *(1 for _ in like_BChw.shape[1:]))
