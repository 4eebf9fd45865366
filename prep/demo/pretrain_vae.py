"""Trains the tiny model's VAE from scratch on drawn pictures, and encodes pictures with it.

Shapes are named by a suffix: B pictures, H W pixels, h w latent cells, C latent channels.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prep.demo.drawing import draw_picture
from prep.demo.optimize import Average, advance, learning_rate, progress
from prep.demo.vocabulary import COLORS, GROUNDS, LEFT_OUT, SHAPES

log = logging.getLogger(__name__)

SIZES = ((96, 96), (80, 112), (112, 80), (128, 64), (64, 144))
"""The (width, height) of every bucket: multiples of 16, that is VAE factor 8 times the UNet's one halving."""

Labels = tuple[str, str, str]  # color, shape, ground
Pictures = tuple[Tensor, list[Labels]]

_KNOWN = tuple(shape for shape in SHAPES if shape != LEFT_OUT[1])
_CROP = 64  # edges and textures are learned from crops, at less than half the cost of whole pictures
_WHOLE_FROM = 0.75  # fraction of the time after which pictures are whole
_KL_WEIGHT = 1e-3  # keeps latents smooth and close to a Gaussian: the UNet needs that more than sharpness


def draw_batch(count: int, size: tuple[int, int], rng: np.random.Generator) -> Pictures:
    """Pictures [B, 3, H, W] in -1..1 of shapes that are not left out, and what each shows."""
    labels = [(str(rng.choice(COLORS)), str(rng.choice(_KNOWN)), str(rng.choice(GROUNDS))) for _ in range(count)]
    drawn = [
        draw_picture(shape=shape, color=color, ground=ground, size=size, seed=int(rng.integers(2**31)))[0]
        for color, shape, ground in labels
    ]
    pixels_BHW3 = torch.from_numpy(np.stack([np.asarray(picture) for picture in drawn]))
    return pixels_BHW3.permute(0, 3, 1, 2).float() / 127.5 - 1, labels


def train_vae(vae: Any, *, minutes: float, seed: int) -> None:
    """Trains `vae` in place; it ends with the average of its weights, and its config with the scale of its latents."""
    rng = np.random.default_rng((seed, 1))
    optimizer = torch.optim.AdamW(vae.parameters(), weight_decay=1e-4)
    average = Average([vae], decay=0.998)
    for step, done in progress(minutes):
        loss, error = _vae_loss(vae, _vae_batch(rng, whole=done > _WHOLE_FROM))
        advance(optimizer, loss, rate=learning_rate(2e-3, step, done))
        average.update()
        if step % 100 == 0:
            log.info("vae %3.0f %%, step %d, loss %.4f, L1 %.4f", 100 * done, step, loss.item(), error.item())
    average.swap()
    latents = [encode(vae, draw_batch(64, size, rng)[0]) for size in SIZES]
    vae.register_to_config(scaling_factor=1 / torch.cat([latent.flatten() for latent in latents]).std().item())


@torch.no_grad()
def encode(vae: Any, pictures_B3HW: Tensor) -> Tensor:
    """The posterior's mean [B, C, h, w], unscaled."""
    mean: Tensor = vae.encode(pictures_B3HW).latent_dist.mean
    return mean


def _vae_batch(rng: np.random.Generator, *, whole: bool) -> Tensor:
    size = SIZES[rng.integers(len(SIZES))] if whole else SIZES[0]
    pictures_B3HW, _ = draw_batch(8 if whole else 16, size, rng)
    if whole:
        return pictures_B3HW
    left, top = rng.integers(0, size[0] - _CROP, 2)
    return pictures_B3HW[..., top : top + _CROP, left : left + _CROP]


def _vae_loss(vae: Any, pictures_B3HW: Tensor) -> tuple[Tensor, Tensor]:
    """The training loss, and the mean absolute error alone."""
    posterior = vae.encode(pictures_B3HW).latent_dist
    error_B3HW = vae.decode(posterior.sample()).sample - pictures_B3HW
    error = error_B3HW.abs().mean()
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
    return error + error_B3HW.square().mean() + _KL_WEIGHT * kl, error
