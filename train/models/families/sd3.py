"""Stable Diffusion 3 and 3.5: a transformer over latents and text, whose table of positions limits the size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.models.families import sd15
from train.models.family import Conditions, DenoiserFamily, Prompted
from train.models.samplers import BY_STEPS, MULTISTEP, SINGLESTEP, UNIPC

if TYPE_CHECKING:
    from torch import Tensor

TIMESTEPS = 1000  # of the published schedules: the transformer takes sigma times this


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity. Neither the attention nor the text has a mask."""
    answer_BChw: Tensor = transformer(
        hidden_states=noised_BChw, timestep=sigma_B * TIMESTEPS, encoder_hidden_states=given.text["hidden"],
        pooled_projections=given.text["pooled"], return_dict=False)[0]
    return answer_BChw


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `StableDiffusion3Pipeline.__call__`."""
    return {**sd15.call(transformer, prompted), "pooled_prompt_embeds": prompted.positive["pooled"],
            "negative_pooled_prompt_embeds": prompted.negative["pooled"]}


def longest_side(config: Mapping[str, Any]) -> int | None:
    """Pixels: `pos_embed_max_size` patches of 2 × 2 latent cells; without a table, any size."""
    patches = config.get("pos_embed_max_size", 96)
    return patches * 16 if type(patches) is int else None


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
PRESETS: Mapping[str, tuple[str, ...]] = {
    # Image and text projections of the joint attention, and those of the image's own attention in 3.5 medium.
    "attention": ATTENTION,
    "all-linear": (*ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
}
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=sd15.unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    # The pipeline gives a shift by size to a scheduler whose config asks for it.
    solvers={**BY_STEPS, MULTISTEP: "any", SINGLESTEP: "any", UNIPC: "any"},
    guidance=7.0,  # the pipeline's default; 3.5 is usually sampled with 3.5 to 4.5
    config_widths={"in_channels": ("latent", 1), "joint_attention_dim": ("hidden", 1),
                   "pooled_projection_dim": ("pooled", 1)},
    longest_side=longest_side, presets=PRESETS, kohya=None)
