"""Stable Diffusion 2 for inpainting: Stable Diffusion 2 "base", with the inputs of Stable Diffusion 1.x for inpainting.

Sources: `StableDiffusionInpaintPipeline` in diffusers 0.42; stabilityai/stable-diffusion-2-inpainting, which was
trained with configs/stable-diffusion/v2-inpainting-inference.yaml of Stability-AI/stablediffusion: in_channels 9,
context_dim 1024, 512 pixels, and no `parameterization`, so that the UNet predicts noise.
"""

from __future__ import annotations

from dataclasses import replace

from prep.models.families import sd15_inpaint, sd21

FAMILY = replace(
    sd21.FAMILY, name="sd21_inpaint", models=("Stable Diffusion 2 Inpainting",),
    pipelines=sd15_inpaint.FAMILY.pipelines, predict=sd15_inpaint.predict, inpainting=sd15_inpaint.INPAINTING,
    resolution=512, sampling=sd15_inpaint.FAMILY.sampling,
)
