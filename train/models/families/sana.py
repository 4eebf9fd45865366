"""SANA: a transformer with linear attention over latent cells and cross-attention to the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prep.models.family import ATTENTION_MASK
from train.models.families import padding, sd15
from train.models.family import Conditions, DenoiserFamily, Prompted
from train.models.samplers import BY_STEPS

if TYPE_CHECKING:
    from torch import Tensor

TIMESTEPS = 1000  # of the published schedules


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity; it takes the time of the schedule, times a number of its config."""
    answer_BChw: Tensor = transformer(
        noised_BChw, encoder_hidden_states=given.text["hidden"], encoder_attention_mask=given.text[ATTENTION_MASK],
        timestep=sigma_B * TIMESTEPS * transformer.config.timestep_scale, return_dict=False)[0]
    return answer_BChw


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `SanaPipeline.__call__`; without binning, which would make pictures of other sizes."""
    return {**padding.embeddings(prompted), "negative_prompt": None, "latents": prompted.latent_1Chw,
            "guidance_scale": prompted.guidance, "use_resolution_binning": False}


PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # With the feed-forward layers, which are convolutions of 1 x 1; not the one of 3 x 3 channel by channel.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "conv_inverted", "conv_point"),
}
# Euler steps along the flow, for pictures that the trained velocity alone decides; the published scheduler has its
# shift under another name, which `load_scheduler` knows.
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=sd15.unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    solvers=BY_STEPS,
    guidance=4.5, presets=PRESETS, kohya=None, in_comfyui=False)
