"""The training loss: the error of a denoiser's prediction, weighted by cell, sample and timestep.

B samples, C latent channels, h and w latent cells. Everything is float32. A sample's loss is the mean over its own
elements, so that a large picture counts as much as a small one. A step adds the losses of its samples, however they are
split into micro-batches, and divides by a number that is known beforehand.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from prep.training.schema import Loss

_NO_AREA = 1e-12  # below any mean of weights other than 0


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


def debiased_weight(alpha_B: Tensor) -> Tensor:
    """The debiased weight, for a prediction of the noise: 1 / sqrt(SNR), where SNR = alpha / (1 - alpha).

    (Yu et al. 2023, Unmasking Bias in Diffusion Model Training, arXiv 2310.08442, whose loss is the mean of
    1 / sqrt(SNR(t)) · |e - e_theta(x_t, t)|²)
    """
    return ((1 - alpha_B) / alpha_B).sqrt()


def cosmap_weight(sigma_B: Tensor) -> Tensor:
    """The density of CosMap as a weight: 2 / (pi · (1 - 2 sigma + 2 sigma²)) (Esser et al. 2024, equation 21)."""
    return 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B.square()))


def inverse_square_weight(sigma_B: Tensor) -> Tensor:
    """1 / sigma²: `sigma_sqrt` in `compute_loss_weighting_for_sd3` of diffusers.training_utils."""
    return sigma_B.pow(-2)


def timestep_weight(settings: Loss, kind: str, level_B: Tensor) -> Tensor:
    """The weight of each sample's loss by its noise level."""
    if settings.weighting == "debiased":
        return debiased_weight(level_B)
    if settings.weighting == "cosmap":
        return cosmap_weight(level_B)
    if settings.weighting == "inverse-square":
        return inverse_square_weight(level_B)
    return min_snr_weight(kind, level_B, settings.min_snr)


def error(predicted_BChw: Tensor, target_BChw: Tensor, huber: float) -> Tensor:
    """The error of each element: squared; or twice Huber's (Huber 1964, equation 2.3), which is the squared error up to
    the difference `huber` and grows linearly beyond."""
    if not huber:
        return functional.mse_loss(predicted_BChw.float(), target_BChw, reduction="none")
    return 2 * functional.huber_loss(predicted_BChw.float(), target_BChw, reduction="none", delta=huber)


def cell_weight(mask_B1hw: Tensor, unmasked_weight: float) -> Tensor:
    """1 where the mask is 1, `unmasked_weight` where it is 0, linear between."""
    return unmasked_weight + (1 - unmasked_weight) * mask_B1hw


def per_sample(predicted_BChw: Tensor, target_BChw: Tensor, weight_B1hw: Tensor | None, *,
               normalize_area: bool, huber: float = 0.0) -> Tensor:
    """Each sample's mean error, `[B]`, with its cells weighted by `weight_B1hw`.

    `normalize_area` divides it by the mean of the sample's own weights, as OneTrainer's option of this name does: the
    cells that train then count the same however small their area. Without any weight the loss is 0.
    """
    error_BChw = error(predicted_BChw, target_BChw, huber)
    if weight_B1hw is None:
        return error_BChw.mean(dim=(1, 2, 3))
    mean_B = (error_BChw * weight_B1hw).mean(dim=(1, 2, 3))
    return mean_B / weight_B1hw.mean(dim=(1, 2, 3)).clamp(min=_NO_AREA) if normalize_area else mean_B


def _spread(value_B: Tensor, like_BChw: Tensor) -> Tensor:
    return value_B.view(-1, *(1 for _ in like_BChw.shape[1:]))
