"""The forward pass from a batch on its device to the loss, for both training and validation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prep.loader.batches import Batch
from prep.loader.device import to_device
from prep.manifest.document import Manifest
from train.config.schema import Loss
from train.models.denoiser import Denoiser, predict
from train.models.family import Conditions
from train.objectives import loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Latents:
    """Converts stored latents to the model's: (stored - shift) · scale, with numbers or per channel (or cell)."""

    scale: float | Tensor
    shift: float | Tensor

    def normalize(self, stored_BChw: Tensor) -> Tensor:
        """The model's latents, float32."""
        shift, scale = (self._spread(value, stored_BChw) for value in (self.shift, self.scale))
        return (stored_BChw.float() - shift) * scale

    def restore(self, latent_BChw: Tensor) -> Tensor:
        """Latents as the VAE makes them."""
        shift, scale = (self._spread(value, latent_BChw) for value in (self.shift, self.scale))
        return latent_BChw / scale + shift

    def to(self, device: torch.device) -> Latents:
        """The same on `device`, so that no step waits for a copy."""
        shift, scale = (to_device(value, device) if isinstance(value, Tensor) else value
                        for value in (self.shift, self.scale))
        return Latents(scale=scale, shift=shift)

    @staticmethod
    def _spread(value: float | Tensor, like_BChw: Tensor) -> float | Tensor:
        """[C, h, w] of `like_BChw` from [C, p, p]: each cell of a patch has its own statistics."""
        if isinstance(value, float):
            return value
        _, height, width = like_BChw.shape[1:]
        here = to_device(value, like_BChw.device)
        return here.repeat(1, height // value.shape[1], width // value.shape[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The denoiser's prediction and its target."""

    predicted_BChw: Tensor
    target_BChw: Tensor
    weight_B1hw: Tensor | None  # None: every cell has weight 1
    weight_B: Tensor  # weight of each sample's error


def latents_of(manifest: Manifest) -> Latents:
    """Scale and shift from the manifest: two numbers, or from the mean and standard deviation of each channel."""
    facts = manifest.document["latents"]
    scale = float(facts["scaling_factor"])
    if "mean" not in facts:
        return Latents(scale=scale, shift=float(facts["shift_factor"]))
    side = math.isqrt(len(facts["mean"]) // facts["channels"])
    mean, std = (torch.tensor([float(value) for value in facts[name]]).view(facts["channels"], side, side)
                 for name in ("mean", "std"))
    return Latents(scale=scale / std, shift=mean)


def forward(denoiser: Denoiser, batch: Batch, latents: Latents, settings: Loss) -> Prediction:
    """One forward pass over `batch`, which is on the denoiser's device."""
    latent_BChw = latents.normalize(batch.latent_BChw)
    kind, level_B = denoiser.prediction, denoiser.levels[batch.timestep_B]
    noised_BChw = loss.noised(kind, latent_BChw, batch.input_noise_BChw, level_B)
    given = Conditions(text=batch.text, sizes_B6=batch.sizes_B6)
    predicted_BChw = predict(denoiser, noised_BChw, batch.timestep_B, given)
    weight_B1hw = None
    if batch.mask_B1hw is not None:
        weight_B1hw = loss.cell_weight(batch.mask_B1hw.to(torch.float32) / 255, settings.unmasked_weight)
    return Prediction(
        predicted_BChw=predicted_BChw, weight_B1hw=weight_B1hw,
        target_BChw=loss.target(kind, latent_BChw, batch.noise_BChw, level_B),
        weight_B=batch.weight_B * loss.timestep_weight(settings, kind, level_B),
    )


def sample_losses(given: Prediction, settings: Loss) -> Tensor:
    """The loss of each sample, `[B]`, not yet multiplied by `given.weight_B`."""
    return loss.per_sample(given.predicted_BChw, given.target_BChw, given.weight_B1hw,
                           normalize_area=settings.normalize_area, huber=settings.huber)
