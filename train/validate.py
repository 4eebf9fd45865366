"""Computes the validation loss: on held-out samples, with noise and timesteps that never change."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.device import to_host
from prep.loader.rows import Rows
from train.models.denoiser import Denoiser, evaluating
from train.objectives.forward import forward, latents_of, sample_losses
from train.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """The validation loss: the mean over all samples and timesteps, and the mean over all samples at each timestep."""

    loss: float
    timesteps: tuple[int, ...]
    losses: tuple[float, ...]  # at each of `timesteps`
    samples: int


def validate(denoiser: Denoiser, rows: Rows, setup: Setup) -> Validated | None:
    """The denoiser's current validation loss, or `None` without validation samples. Does not change the denoiser.

    Each sample is predicted from its first view and first text. Masks weight the cells as in training; sample weights
    and min-SNR are not applied, so that runs with different settings of these compare.
    """
    config = setup.config
    wanted = draws.spread(config.validation.timesteps, denoiser.timesteps)
    requests = draws.validation(rows.index, config.micro_batch, count=config.validation.timesteps,
                                timesteps=denoiser.timesteps)
    sums, counts = dict.fromkeys(wanted, 0.0), dict.fromkeys(wanted, 0)
    latents = latents_of(setup.manifest)
    with (evaluating(denoiser), torch.no_grad(),
          batches(rows, requests, masked=setup.masked, pinned=denoiser.device.type == "cuda") as feed):
        for batch in feed:
            given = forward(denoiser, batch.to(denoiser.device), latents, config.loss)
            each = sample_losses(given, config.loss)
            for shot, value in zip(batch.shots, to_host(each).tolist(), strict=True):
                sums[shot.timestep] += value
                counts[shot.timestep] += 1
    samples = counts[wanted[0]]
    if not samples:
        return None
    losses = tuple(sums[at] / counts[at] for at in wanted)
    return Validated(loss=sum(sums.values()) / sum(counts.values()), timesteps=tuple(wanted), losses=losses,
                     samples=samples)
