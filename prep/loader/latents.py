"""Between latents as they are stored and as a denoiser takes them.

B samples, C channels, h w latent cells, p cells of a patch's side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prep.loader.device import to_device
from prep.manifest.document import Manifest


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
        """The conversion with its numbers on `device`, so that no step waits for a copy."""
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
