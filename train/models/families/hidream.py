"""HiDream-I1: a transformer with experts, over latents and the tokens of T5 and of Llama's layers.

B samples, N layers of Llama, L tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from prep.models.families.hidream import layers_of
from train.models.families import sd15
from train.models.family import Conditions, DenoiserFamily, Prompted, TextArrays
from train.models.naming import Kohya
from train.models.samplers import BY_SHIFT, UNIPC

if TYPE_CHECKING:
    from torch import Tensor

TIMESTEPS = 1000  # of the published schedules: the transformer takes sigma times this
PATCH, FACTOR = 2, 8


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The velocity: the transformer returns its negative. Neither the attention nor the text has a mask."""
    answer: Tensor = transformer(
        hidden_states=noised_BChw, timesteps=sigma_B * TIMESTEPS, encoder_hidden_states_t5=given.text["t5"],
        encoder_hidden_states_llama3=_by_layer(transformer, given.text), pooled_embeds=given.text["pooled"],
        return_dict=False)[0]
    in_patches = transformer.training and not transformer.config.force_inference_output
    return -(_whole(answer, noised_BChw) if in_patches else answer)


def _by_layer(transformer: Any, text: TextArrays) -> Tensor:
    """[N, B, L, D], where each stored layer is at its own number, as the transformer looks it up; zeros elsewhere."""
    layers, llama_BNLD = layers_of(transformer.config.llama_layers), text["llama"]
    found = llama_BNLD.new_zeros((layers[-1] + 1, llama_BNLD.shape[0], *llama_BNLD.shape[2:]))
    found[layers] = llama_BNLD.transpose(0, 1)
    return found


def _whole(answer_BCNP: Tensor, like_BChw: Tensor) -> Tensor:
    """[B, C, h, w] of patches [B, C, N, 4]: in training the transformer does not put them together.

    Of a latent that is not square, patches beyond its own are padding.
    """
    count, channels, height, width = like_BChw.shape
    rows, columns = height // PATCH, width // PATCH
    parts = answer_BCNP[:, :, :rows * columns].reshape(count, channels, rows, columns, PATCH, PATCH)
    return parts.permute(0, 1, 2, 4, 3, 5).reshape(count, channels, height, width)


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `HiDreamImagePipeline.__call__`."""
    given = {"latents": prompted.latent_1Chw, "guidance_scale": prompted.guidance}
    for prefix, text in (("", prompted.positive), ("negative_", prompted.negative)):
        given |= {f"{prefix}prompt_embeds_t5": text["t5"], f"{prefix}pooled_prompt_embeds": text["pooled"],
                  f"{prefix}prompt_embeds_llama3": _by_layer(transformer, text)}
    return given


def prepare(pipeline: Any, size: Size) -> None:
    """Lets the pipeline make a picture of `size`: it gives each picture the area of a square of its default size.

    It rounds down, so the square is a billionth larger.
    """
    pipeline.default_sample_size = sqrt(size[0] * size[1]) * (1 + 1e-9) / FACTOR


ATTENTION = ("to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t")
PRESETS: Mapping[str, tuple[str, ...]] = {
    # Image and text projections of the joint attention, and the attention of the single blocks.
    "attention": ATTENTION,
    # With the feed-forward layers that all tokens go through; experts see few tokens each.
    "all-linear": (*ATTENTION, *(f"{part}.{name}" for part in ("ff_t", "shared_experts")
                                 for name in ("w1", "w2", "w3"))),
}
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=sd15.unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    # The pipeline always gives a shift by size, but to UniPC never.
    solvers={**BY_SHIFT, UNIPC: "static"},
    guidance=5.0,  # the pipeline's default
    prepare=prepare, presets=PRESETS,
    kohya=Kohya(imported=False))  # the authors name layers as diffusers does; ComfyUI reads them so
