"""Stable Diffusion 1.x: a UNet with cross-attention to the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from train.models.families.unet import original_rules
from train.models.family import Conditions, DenoiserFamily, Prompted
from train.models.naming import UNET

if TYPE_CHECKING:
    from torch import Tensor


def predict(unet: Any, noised_BChw: Tensor, timestep_B: Tensor, given: Conditions) -> Tensor:
    """The UNet's answer; it has no text mask."""
    answer_BChw: Tensor = unet(noised_BChw, timestep_B, given.text["hidden"]).sample
    return answer_BChw


def call(unet: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `StableDiffusionPipeline.__call__`."""
    return {"prompt_embeds": prompted.positive["hidden"], "negative_prompt_embeds": prompted.negative["hidden"],
            "latents": prompted.latent_1Chw, "guidance_scale": prompted.guidance}


def unpack(unet: Any, latent_1Chw: Tensor, size: Size) -> Tensor:
    """The pipeline's latents are as they should be."""
    return latent_1Chw


KOHYA = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # The linear layers of the transformer blocks; resnets and embeddings get no adapter, as in kohya's trainer.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
    # With the layers around the blocks, which are 1x1 convolutions or linear: what sd-scripts adapts without conv_dim.
    "kohya": KOHYA,
    # With all layers of the resnets and samplers: what sd-scripts adapts with conv_dim, and LyCORIS as LoCon.
    "kohya-conv": (*KOHYA, "conv1", "conv2", "conv_shortcut", "time_emb_proj", "re:samplers\\.0\\.conv$"),
}
# DDIM: the same pictures for the same noise. Latents are unbounded, so no clipping, as in StableDiffusionPipeline.
DENOISER = DenoiserFamily(predict=predict, call=call, unpack=unpack, sampler="DDIMScheduler",
                          sampler_options={"clip_sample": False}, guidance=7.5, presets=PRESETS, kohya=UNET,
                          original=original_rules)
