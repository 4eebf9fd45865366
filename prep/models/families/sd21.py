"""Stable Diffusion 2.x, at 768 pixels (v-prediction) and "base" at 512 (epsilon): Stable Diffusion 1's pipeline with
OpenCLIP and another UNet.

Sources: stabilityai/stable-diffusion-2-1 (unet/config.json: use_linear_projection true, which Stable Diffusion 1 has
not; vae/config.json: the VAE of Stable Diffusion 1). The text encoder's config has one layer less than OpenCLIP, so
that its last layer is the one that the UNet was trained with. The scheduler's config says what the UNet predicts.
"""

from __future__ import annotations

from dataclasses import replace

from prep.models.configs import Configs
from prep.models.families import sd15
from prep.models.family import Labels


def fits(configs: Configs) -> bool:
    """Whether the UNet projects pictures with linear layers, and takes nothing that Stable Diffusion 1's does not."""
    return sd15.is_plain(configs("unet")) and configs("unet").get("use_linear_projection") is True


def labels(prediction: str, configs: Configs) -> Labels:
    """The model at 768 pixels predicts v, "base" noise."""
    if prediction == "v_prediction":
        return Labels(architecture="stable-diffusion-v2-768-v", version="sd_v2_v", v2=True)
    return Labels(architecture="stable-diffusion-v2-512", version="sd_v2", v2=True)


FAMILY = replace(sd15.FAMILY, name="sd21", labels=labels, models=("Stable Diffusion 2.x",), fits=fits, resolution=768)
