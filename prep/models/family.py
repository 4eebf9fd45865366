"""Facts about model families: the layout of their latents and text rows. Each family is a dict entry, no code.

Scale and shift come from the VAE's config when a dataset is encoded; the values here, those of the family's published
models, apply if the config has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Facts that hold for every model of a family."""

    pipeline: str  # the diffusers class named in model_index.json
    latent_channels: int
    factor: int  # pixels per latent cell and side
    patch: int  # the denoiser needs sides that are multiples of this, in latent cells
    step: int  # default bucket step in pixels
    resolution: int  # side of its training pictures, in pixels
    scaling_factor: str  # decimal strings: canonical JSON has no floats
    shift_factor: str
    text_arrays: tuple[str, ...]
    text_layout: Literal["full", "trimmed"]  # full: attention covers padding, so none may be trimmed
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
    """The family whose pipelines have this diffusers class, or `None`."""
    for name, family in FAMILIES.items():
        if family.pipeline == class_name:
            return name
    return None
