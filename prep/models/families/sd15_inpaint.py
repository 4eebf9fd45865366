"""Stable Diffusion 1.x for inpainting: told by a mask what to paint, and shown the picture with that part hidden.

Sources: `StableDiffusionInpaintPipeline` in diffusers 0.42; stable-diffusion-v1-5/stable-diffusion-inpainting
(unet/config.json: in_channels 9). The UNet's input is the noisy latent, the mask and the masked picture's latent, side
by side in the channels. The pipeline makes the mask 0 or 1 (`VaeImageProcessor.binarize`, 1 from 0.5 on), takes the
first pixel of each latent cell (`interpolate`, nearest), and multiplies the picture, from -1 to 1, by `mask < 0.5`. It
draws the masked latent from the VAE's posterior; here it is the mean. All else is Stable Diffusion's.

Sample pictures begin with pure noise, as the pipeline's do by its default `strength` of 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prep.models.families import sd15
from prep.models.family import Conditions, Inpainting

if TYPE_CHECKING:
    from torch import Tensor


def join(noised_BChw: Tensor, mask_BMhw: Tensor, masked_BChw: Tensor) -> Tensor:
    """[B, 2C + M, h, w]: like `torch.cat`, but the facts of families are read without torch."""
    count, channels, height, width = noised_BChw.shape
    ends = channels + mask_BMhw.shape[1], 2 * channels + mask_BMhw.shape[1]
    whole = noised_BChw.new_empty((count, ends[1], height, width))
    whole[:, :channels], whole[:, channels:ends[0]], whole[:, ends[0]:] = noised_BChw, mask_BMhw, masked_BChw
    return whole


def joined(noised_BChw: Tensor, conditions: Conditions) -> Tensor:
    """The UNet's input in a step."""
    (masked_BChw,), mask_BMhw = conditions.references, conditions.inpaint_mask
    assert mask_BMhw is not None, "samples of a family that inpaints have a mask"
    return join(noised_BChw, mask_BMhw, masked_BChw)


def predict(unet: Any, noised_BChw: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
    """The UNet's answer to all of them."""
    return sd15.predict(unet, joined(noised_BChw, conditions), timestep_B, conditions)


INPAINTING = Inpainting(cell="first", join=join)
FAMILY = replace(
    sd15.FAMILY, name="sd15_inpaint", models=("Stable Diffusion 1.x Inpainting",),
    pipelines=("StableDiffusionInpaintPipeline",), predict=predict, inpainting=INPAINTING,
    # Its own insists on pictures, which it would mask and encode again; loop and schedule are the same.
    sampling=replace(sd15.SAMPLING, pipeline="StableDiffusionPipeline"),
)
