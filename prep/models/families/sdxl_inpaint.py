"""Stable Diffusion XL for inpainting: SDXL, with the inputs of Stable Diffusion 1.x for inpainting.

Sources: `StableDiffusionXLInpaintPipeline` in diffusers 0.42, which treats mask and picture as that of 1.x does;
diffusers/stable-diffusion-xl-1.0-inpainting-0.1 (unet/config.json: in_channels 9).

Sample pictures begin with pure noise, as the pipeline's do with a `strength` of 1; by its default of 0.9999 they begin
one step later, with a little of the picture. Its guidance is 7.5 by default, not SDXL's 5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prep.models.families import sd15_inpaint, sdxl
from prep.models.family import Conditions

if TYPE_CHECKING:
    from torch import Tensor


def predict(unet: Any, noised_BChw: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
    """The UNet's answer to the noisy latent, the mask and the masked picture's latent."""
    return sdxl.predict(unet, sd15_inpaint.joined(noised_BChw, conditions), timestep_B, conditions)


FAMILY = replace(
    sdxl.FAMILY, name="sdxl_inpaint", models=("Stable Diffusion XL Inpainting",),
    pipelines=("StableDiffusionXLInpaintPipeline",), predict=predict, inpainting=sd15_inpaint.INPAINTING,
    sampling=replace(sdxl.SAMPLING, pipeline="StableDiffusionXLPipeline", guidance=7.5),
)
