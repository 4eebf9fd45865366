"""Stable Diffusion 2.x: the UNet is called as in Stable Diffusion 1."""

from __future__ import annotations

from train.models.families import sd15

DENOISER = sd15.DENOISER
