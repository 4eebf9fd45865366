"""The forward pass from a batch on its device to the loss, for both training and validation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prep.loader.batches import Batch
from prep.loader.latents import Latents
from prep.models.family import Conditions
from prep.training.schema import Loss
from train.models.denoiser import Denoiser, predict
from train.objectives import loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The denoiser's prediction and its target."""

    predicted_BChw: Tensor
    target_BChw: Tensor
    weight_B1hw: Tensor | None  # None: every cell has weight 1
    weight_B: Tensor  # weight of each sample's error


def forward(denoiser: Denoiser, batch: Batch, latents: Latents, settings: Loss) -> Prediction:
    """One forward pass over `batch`, which is on the denoiser's device."""
    latent_BChw = latents.normalize(batch.latent_BChw)
    kind, level_B = denoiser.prediction, denoiser.levels[batch.timestep_B]
    noised_BChw = loss.noised(kind, latent_BChw, batch.input_noise_BChw, level_B)
    conditions = Conditions(text=batch.text, sizes_B6=batch.sizes_B6,
                            references=[latents.normalize(reference_BChw) for reference_BChw in batch.references],
                            inpaint_mask=None if batch.inpaint_mask_BMhw is None else
                            batch.inpaint_mask_BMhw.to(torch.float32) / 255)
    predicted_BChw = predict(denoiser, noised_BChw, batch.timestep_B, conditions)
    weight_B1hw = None
    if batch.mask_B1hw is not None:
        weight_B1hw = loss.cell_weight(batch.mask_B1hw.to(torch.float32) / 255, settings.unmasked_weight)
    return Prediction(
        predicted_BChw=predicted_BChw, weight_B1hw=weight_B1hw,
        target_BChw=loss.target(kind, latent_BChw, batch.noise_BChw, level_B),
        weight_B=batch.weight_B * loss.timestep_weight(settings, kind, level_B),
    )


def sample_losses(prediction: Prediction, settings: Loss) -> Tensor:
    """The loss of each sample, `[B]`, not yet multiplied by `prediction.weight_B`."""
    return loss.per_sample(prediction.predicted_BChw, prediction.target_BChw, prediction.weight_B1hw,
                           normalize_area=settings.normalize_area, huber=settings.huber)
