"""Ovis-Image: Qwen3 for the tokens of a caption behind a system prompt, and FLUX.1's VAE.

Sources: `OvisImagePipeline` in diffusers 0.42. `encode_prompt` writes system prompt and caption into the tokenizer's
chat template (part of the text fingerprint), cuts off the first 28 tokens, and sets the rest of a row to zeros where
the caption ends. 256 tokens are its default and its most. Nothing masks these zeros, and tokens are numbered, so a
row has all of them. The VAE's factors are FLUX.1's; the transformer takes patches of 2 × 2 latent cells.

The transformer is FLUX.1's without pooled text and guidance, and with numbered text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser import packing
from prep.models.families import flux
from prep.models.family import (
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    Shape,
    TextEncoding,
    TextOptions,
    TextRow,
)

if TYPE_CHECKING:
    from torch import Tensor

# The pipeline's own; a pipeline of another release gets them, too, so that rows are what their keys say.
SYSTEM_PROMPT = ("Describe the image by detailing the color, quantity, text, shape, size, texture, spatial "
                 "relationships of the objects and background: ")
TEMPLATE_TOKENS = 28


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of Qwen3."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption. The positions of text tokens count from 0, so they are not stored."""
    pipeline.system_prompt, pipeline.user_prompt_begin_id = SYSTEM_PROMPT, TEMPLATE_TOKENS
    hidden_BLD, *_ = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False, device=device,
                                            max_sequence_length=options.max_length)
    return [{"hidden": hidden} for hidden in hidden_BLD]


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="full", max_length=256, longest=256, shapes=shapes,
                    encode=encode,
                    constants={"system_prompt": SYSTEM_PROMPT, "template_tokens": TEMPLATE_TOKENS})


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself."""
    hidden_BLD = conditions.text["hidden"]
    packed = transformer(
        hidden_states=packing.pack(noised_BChw), timestep=sigma_B, encoder_hidden_states=hidden_BLD,
        txt_ids=numbers(hidden_BLD), img_ids=packing.positions(noised_BChw), return_dict=False)[0]
    return packing.unpack(packed, (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def numbers(hidden_BLD: Tensor) -> Tensor:
    """[L, 3] float32: the number of each token on axes 1 and 2, zero on axis 0."""
    count = hidden_BLD.shape[1]
    ids = hidden_BLD.new_zeros((count, 3)).float()
    ids[:, 1:] += ids.new_tensor(range(count))[:, None]
    return ids


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `OvisImagePipeline.__call__`, whose negative prompt is "" unless none is asked for."""
    return {"prompt_embeds": prompted.positive["hidden"], "negative_prompt_embeds": prompted.negative["hidden"],
            "negative_prompt": None, "latents": packing.pack(prompted.latent_1Chw),
            "guidance_scale": prompted.guidance}


SAMPLING = replace(flux.SAMPLING, call=call, guidance=5.0)  # the pipeline's default


# ---- LoRA ------------------------------------------------------------------------------------------------------------

LORA = LoraLayers(presets=flux.PRESETS, kohya=None, in_diffusers=False)  # layers are named as FLUX.1's


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "Qwen3Model"),),
    "tokenizer": (("transformers", "Qwen2Tokenizer"), ("transformers", "Qwen2TokenizerFast")),
    "transformer": (("diffusers", "OvisImageTransformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    name="ovis", models=("Ovis-Image",), pipelines=("OvisImagePipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024,
    scaling_factor="0.3611", shift_factor="0.1159", predictions=("flow",), text=TEXT,
    predict=predict, chooses_attention=True, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="ovis-image"),
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
