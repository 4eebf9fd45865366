"""FLUX.1: a transformer over text tokens and packed latents; the dev model takes guidance as a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from train.models.families import packing
from train.models.family import Conditions, DenoiserFamily, Prompted

if TYPE_CHECKING:
    from torch import Tensor

FACTOR = 8


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma and guidance by 1000 itself."""
    hidden_BLD = given.text["hidden"]
    guided = transformer.config.guidance_embeds
    packed = transformer(
        hidden_states=packing.pack(noised_BChw), timestep=sigma_B,
        guidance=sigma_B.new_full(sigma_B.shape, given.guidance) if guided else None,
        pooled_projections=given.text["pooled"], encoder_hidden_states=hidden_BLD,
        txt_ids=hidden_BLD.new_zeros((hidden_BLD.shape[1], 3)), img_ids=packing.positions(noised_BChw),
        return_dict=False)[0]
    return packing.unpack(packed, (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `FluxPipeline.__call__`: guidance is the model's own number, and no negative is used."""
    return {"prompt_embeds": prompted.positive["hidden"], "pooled_prompt_embeds": prompted.positive["pooled"],
            "latents": packing.pack(prompted.latent_1Chw), "guidance_scale": prompted.guidance}


def unpack(transformer: Any, packed_1NP: Tensor, size: Size) -> Tensor:
    """The pipeline's latents, unpacked."""
    return packing.unpack(packed_1NP, (size[0] // FACTOR, size[1] // FACTOR))


PRESETS: Mapping[str, tuple[str, ...]] = {
    # Image and text projections of the attention, in double and single blocks.
    "attention": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
                   "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out"),
}
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    guidance=3.5, takes_guidance=True,
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1),
                   "pooled_projection_dim": ("pooled", 1)},
    presets=PRESETS, kohya=None)
