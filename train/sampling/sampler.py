"""Samples pictures: a DDIM loop with guidance over cached text rows, then the VAE, which is loaded only for decoding.

C latent channels, h w latent cells, H W pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor

from prep.batching.rng import draw_key, philox
from prep.cache.records import RowRef
from prep.geometry import Size
from prep.loader.device import module_to_device, to_device, to_host
from prep.loader.index import Index
from prep.loader.rows import Rows
from prep.models.vae import load_vae
from train.config.schema import Sampling
from train.models.denoiser import Denoiser, evaluating, load_scheduler, predict, quiet
from train.objectives.forward import Latents, latents_of
from train.sampling.prompts import PromptRows


def pictures(denoiser: Denoiser, rows: Rows, model: Path, prompts: Sequence[PromptRows],
             settings: Sampling) -> list[np.ndarray]:
    """One picture per prompt, uint8 [H, W, 3]; a prompt's own settings override `settings`.

    The same seed, prompt and size always start from the same noise. Raises `CacheError`, `ModelError`.
    """
    usual = settings.size or usual_size(rows.index)
    facts = rows.index.manifest.document["latents"]
    channels, factor = int(facts["channels"]), int(facts["factor"])
    with evaluating(denoiser), torch.no_grad():
        latents = []
        for prompt in prompts:
            width, height = prompt.settings.width or usual[0], prompt.settings.height or usual[1]
            shape = (channels, height // factor, width // factor)
            latents.append(_denoise(denoiser, rows, model, prompt, shape, _settings_of(prompt, settings)))
        return _decode(model, latents, latents_of(rows.index.manifest), denoiser.device)


def _settings_of(prompt: PromptRows, settings: Sampling) -> Sampling:
    """`settings` with the prompt's own seed, steps and guidance, if set."""
    own = {name: value for name in ("seed", "steps", "guidance")
           if (value := getattr(prompt.settings, name)) is not None}
    return replace(settings, **own)


def usual_size(index: Index) -> Size:
    """The bucket with the most training samples; the first in a tie."""
    counts = [len(members) for members in index.training]
    return index.manifest.buckets[counts.index(max(counts))]


def _denoise(denoiser: Denoiser, rows: Rows, model: Path, prompt: PromptRows, shape: tuple[int, int, int],
             settings: Sampling) -> Tensor:
    """The sampled latent `[1, C, h, w]`. Guidance: Ho & Salimans 2022, equation 6."""
    guided = settings.guidance > 1
    parts = [prompt.negative, prompt.positive] if guided else [prompt.positive]
    text = to_device(torch.cat([_text(rows, part) for part in parts]), denoiser.device)
    scheduler = _scheduler(model, denoiser.prediction)
    scheduler.set_timesteps(settings.steps, device=denoiser.device)
    latent = to_device(torch.from_numpy(_noise(prompt.prompt, shape, settings.seed))[None], denoiser.device)
    latent = latent * float(scheduler.init_noise_sigma)
    for timestep in scheduler.timesteps:
        seen = scheduler.scale_model_input(latent.expand(len(parts), *shape), timestep)
        said = predict(denoiser, seen, timestep.expand(len(parts)), text).float()
        if guided:
            against, towards = said.chunk(2)
            said = against + settings.guidance * (towards - against)
        latent = scheduler.step(said, timestep, latent).prev_sample
    done: Tensor = latent
    return done


def _text(rows: Rows, part: RowRef | Tensor) -> Tensor:
    """One text row `[1, L, D]`, read from the cache unless `part` is the row itself."""
    return part if isinstance(part, Tensor) else rows.text([part])


def _scheduler(model: Path, prediction: str) -> Any:
    """DDIM on the model's own noise schedule. Latents are unbounded, so no clipping, as in StableDiffusionPipeline."""
    return load_scheduler(diffusers.DDIMScheduler, model, prediction_type=prediction, clip_sample=False)


def _noise(prompt: str, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    key = draw_key(seed, 0, hashlib.sha256(prompt.encode()).digest(), 0, "sample")
    return philox(key).standard_normal(shape, dtype=np.float32)


def _decode(model: Path, latents: Sequence[Tensor], facts: Latents, device: torch.device) -> list[np.ndarray]:
    """Decodes scaled latents one by one; the VAE is in memory only during this call."""
    if not latents:
        return []
    quiet()
    vae = load_vae(model, torch.float32)
    module_to_device(vae, device).eval()
    return [_pixels(vae.decode(latent / facts.scale + facts.shift).sample) for latent in latents]


def _pixels(decoded: Tensor) -> np.ndarray:
    scaled_CHW = ((decoded[0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    picture: np.ndarray = to_host(scaled_CHW).permute(1, 2, 0).numpy()
    return picture
