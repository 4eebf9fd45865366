"""The forward pass from a batch on its device to the loss, for both training and validation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prep.loader.batches import Batch
from prep.manifest.document import Manifest
from train.config.schema import Loss
from train.models.denoiser import Denoiser, predict
from train.objectives import loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Latents:
    """Converts stored latents to the model's latents: (stored - shift) · scale."""

    scale: float
    shift: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The denoiser's prediction and its target."""

    predicted_BChw: Tensor
    target_BChw: Tensor
    weight_B1hw: Tensor | None  # None: every cell has weight 1
    weight_B: Tensor  # weight of each sample's error


def latents_of(manifest: Manifest) -> Latents:
    """Scale and shift from the manifest."""
    facts = manifest.document["latents"]
    return Latents(scale=float(facts["scaling_factor"]), shift=float(facts["shift_factor"]))


def forward(denoiser: Denoiser, batch: Batch, latents: Latents, settings: Loss) -> Prediction:
    """One forward pass over `batch`, which is on the denoiser's device."""
    latent_BChw = (batch.latent_BChw.float() - latents.shift) * latents.scale
    alpha_B = denoiser.alphas[batch.timestep_B]
    noised_BChw = loss.noised(latent_BChw, batch.noise_BChw, alpha_B)
    predicted_BChw = predict(denoiser, noised_BChw, batch.timestep_B, batch.text_BLD)
    weight_B1hw = None
    if batch.mask_B1hw is not None:
        weight_B1hw = loss.cell_weight(batch.mask_B1hw.to(torch.float32) / 255, settings.unmasked_weight)
    return Prediction(
        predicted_BChw=predicted_BChw, weight_B1hw=weight_B1hw,
        target_BChw=loss.target(denoiser.prediction, latent_BChw, batch.noise_BChw, alpha_B),
        weight_B=batch.weight_B * loss.min_snr_weight(denoiser.prediction, alpha_B, settings.min_snr),
    )


def loss_sums(given: Prediction, settings: Loss) -> loss.Sums:
    """The batch's contribution to its step's loss."""
    return loss.sums(given.predicted_BChw, given.target_BChw, weight_B1hw=given.weight_B1hw, weight_B=given.weight_B,
                     normalize_area=settings.normalize_area)
