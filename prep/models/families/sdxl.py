"""Stable Diffusion XL: two CLIP text encoders side by side, a pooled vector, and size conditions.

Sources: stabilityai/stable-diffusion-xl-base-1.0 (vae/config.json: scaling_factor 0.13025);
Podell et al. 2023, section 2.2, for the size conditions, which belong to pictures, not to captions. Text rows are those
of `StableDiffusionXLPipeline.encode_prompt` in diffusers 0.42: the last layer but one of both encoders, without a norm.

The UNet also takes the pooled vector and the sizes of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.families import sd15
from prep.models.family import Conditions, Family, Labels, Prompted, Shape, TextEncoding, TextOptions, TextRow
from prep.models.lora.kohya import Kohya
from prep.models.lora.unet import original_rules
from prep.models.text import clip

if TYPE_CHECKING:
    from torch import Tensor


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]: both encoders' channels; `pooled` [channel]: the second encoder's projection."""
    width = configs.width("text_encoder", "hidden_size") + configs.width("text_encoder_2", "hidden_size")
    return {"hidden": (options.tokens, width), "pooled": (configs.width("text_encoder_2", "projection_dim"),)}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` and one `pooled` per caption. Padding is part of them: the UNet has no text mask."""
    if options.windows > 1:
        hidden_BLD, pooled_BD = _in_windows(pipeline, captions, options, device)
    else:
        hidden_BLD, _, pooled_BD, _ = pipeline.encode_prompt(
            prompt=list(captions), device=device, do_classifier_free_guidance=False,
            clip_skip=options.clip_skip or None)
    return [{"hidden": hidden, "pooled": pooled} for hidden, pooled in zip(hidden_BLD, pooled_BD, strict=True)]


def _in_windows(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> tuple[Any, Any]:
    """Hidden states [B, L, D] of both encoders, windows side by side along L; pooled vectors [B, D] of the first
    window.
    """
    layer = -(options.clip_skip + 2)
    first = clip.encode(pipeline.tokenizer, pipeline.text_encoder, captions, options, device)
    first_BLD = clip.joined(first.hidden_states[layer], options)  # before the next encoder takes the memory of this one
    second = clip.encode(pipeline.tokenizer_2, pipeline.text_encoder_2, captions, options, device)
    second_BLD = clip.joined(second.hidden_states[layer], options)
    hidden_BLD = second_BLD.new_empty(*second_BLD.shape[:2], first_BLD.shape[2] + second_BLD.shape[2])
    hidden_BLD[..., :first_BLD.shape[2]], hidden_BLD[..., first_BLD.shape[2]:] = first_BLD, second_BLD
    return hidden_BLD, second.text_embeds[::options.windows]


def without_prompt(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: zeros if force_zeros_for_empty_prompt is set (as in the base model), else "".

    It is repeated for each window. A clip_skip does not apply to it in diffusers either.
    """
    _, hidden_1LD, _, pooled_1D = pipeline.encode_prompt(prompt="", device=device, do_classifier_free_guidance=True)
    return {"hidden": hidden_1LD[0].repeat(options.windows, 1), "pooled": pooled_1D[0]}


TEXT = TextEncoding(arrays={"hidden": ("token", "channel"), "pooled": ("channel",)}, layout="full", max_length=77,
                    shortest=77, longest=77, shapes=shapes, encode=encode, without_prompt=without_prompt,
                    pipeline_options=("force_zeros_for_empty_prompt",), clip=True, windows=True)


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(unet: Any, noised_BChw: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
    """The UNet's answer. Sizes stay float32: bfloat16 has no 1001, and the UNet embeds them before it casts."""
    more = {"text_embeds": conditions.text["pooled"], "time_ids": conditions.sizes_B6}
    answer_BChw: Tensor = unet(noised_BChw, timestep_B, encoder_hidden_states=conditions.text["hidden"],
                               added_cond_kwargs=more).sample
    return answer_BChw


def call(unet: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `StableDiffusionXLPipeline.__call__`; its sizes are those of the picture."""
    return {**sd15.call(unet, prompted), "pooled_prompt_embeds": prompted.positive["pooled"],
            "negative_pooled_prompt_embeds": prompted.negative["pooled"]}


SAMPLING = replace(sd15.SAMPLING, call=call, guidance=5.0)  # the pipeline's default


# ---- LoRA ------------------------------------------------------------------------------------------------------------

# The names of the authors' code: sd-scripts has its own UNet for SDXL, with the layers of these.
LORA = replace(sd15.LORA, kohya=Kohya(usual=True, rules=original_rules(()), counted=True))


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    **sd15.COMPONENTS,
    "text_encoder_2": (("transformers", "CLIPTextModelWithProjection"),),
    "tokenizer_2": sd15.COMPONENTS["tokenizer"],
}
FAMILY = Family(
    name="sdxl", models=("Stable Diffusion XL",), pipelines=("StableDiffusionXLPipeline",), denoiser="unet",
    components=COMPONENTS, latent_channels=4, factor=8, patch=1, step=64, resolution=1024, scaling_factor="0.13025",
    shift_factor="0", predictions=("epsilon", "v_prediction"), upcasts_vae=True, text=TEXT, predict=predict,
    sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="stable-diffusion-xl-v1-base", version="sdxl_base_v1-0", v2=False),
    config_widths={"in_channels": ("latent", 1), "cross_attention_dim": ("hidden", 1)},
)
