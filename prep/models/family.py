"""Facts about model families: what their latents and text rows look like. A row of a dict each, no code.

Scale and shift are taken from the VAE's own config when a cache is made; the values here are what the family's
published models have, for a config that does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What is true of every model of a family."""

    pipeline: str  # the diffusers class named in model_index.json
    latent_channels: int
    factor: int  # pixels per latent cell and side
    patch: int  # latent cells that the denoiser needs a side to be a multiple of
    step: int  # default bucket step in pixels
    resolution: int  # the side it was trained at
    scaling_factor: str  # decimal strings: canonical JSON has no floats
    shift_factor: str
    text_arrays: tuple[str, ...]
    text_layout: Literal["full", "trimmed"]  # full: every padded position is attended to, nothing may be cut off
    max_length: int  # tokens


FAMILIES: Mapping[str, Family] = {
    # factor and scale: AutoencoderKL of runwayml/stable-diffusion-v1-5 (vae/config.json: scaling_factor 0.18215,
    # four down blocks, three of them halving). patch: its UNet halves three times. 77: CLIP's position table.
    "sd15": Family(
        pipeline="StableDiffusionPipeline", latent_channels=4, factor=8, patch=8, step=64, resolution=512,
        scaling_factor="0.18215", shift_factor="0", text_arrays=("hidden",), text_layout="full", max_length=77,
    ),
}


def family_of_pipeline(class_name: str) -> str | None:
    """The family whose pipelines are of this diffusers class, or `None`."""
    for name, family in FAMILIES.items():
        if family.pipeline == class_name:
            return name
    return None
