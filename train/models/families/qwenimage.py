"""Qwen-Image: a transformer over packed latents and text, which masks the padding of the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.models.families import flux, packing, padding
from train.models.family import Conditions, DenoiserFamily, Prompted
from train.models.naming import Kohya
from train.models.samplers import BY_SIGMAS

if TYPE_CHECKING:
    from torch import Tensor


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself. A picture has one frame."""
    count, _, height, width = noised_BChw.shape
    hidden_BLD, mask_BL = padding.cut(given.text, "hidden")
    shape = (1, height // packing.PATCH, width // packing.PATCH)
    packed = transformer(
        hidden_states=packing.pack(noised_BChw), timestep=sigma_B, encoder_hidden_states=hidden_BLD,
        encoder_hidden_states_mask=mask_BL, img_shapes=[[shape]] * count, return_dict=False)[0]
    return packing.unpack(packed, (width, height))


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `QwenImagePipeline.__call__`. Rows of one picture need no mask."""
    (positive, _), (negative, _) = (padding.cut(text, "hidden") for text in (prompted.positive, prompted.negative))
    return {"prompt_embeds": positive, "negative_prompt_embeds": negative, "true_cfg_scale": prompted.guidance,
            "latents": packing.pack(prompted.latent_1Chw)}


PRESETS: Mapping[str, tuple[str, ...]] = {
    # Image and text projections of the joint attention.
    "attention": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    # With the feed-forward layers of both streams; no modulation, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
                   "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
}
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=flux.unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    solvers=BY_SIGMAS,
    guidance=4.0,  # the pipeline's default true_cfg_scale
    presets=PRESETS, kohya=Kohya(usual=True))  # the authors name layers as diffusers does
