"""Tiny random pipelines, one per model family, made offline in well under a second.

    pipeline = build("flux", guidance=False)   # complete: tokenizers, text encoders, denoiser, VAE, schedule
    folder = save("sd3", tmp_path / "model")   # a pipeline directory like any other

Factors, channels and statistics of latents, text arguments, schedules and inputs of the denoiser are those of the
published models; widths and numbers of layers are tiny. Checked with diffusers 0.42 and transformers 5.
"""

from __future__ import annotations

from tiny_pipelines.calls import draw, encode_prompts, known_warnings, load, over_white, text_only
from tiny_pipelines.making import FAMILIES, SECONDARY, build, networks, save

__all__ = ["FAMILIES", "SECONDARY", "build", "draw", "encode_prompts", "known_warnings", "load", "networks",
           "over_white", "save", "text_only"]
