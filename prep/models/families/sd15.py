"""Stable Diffusion 1.x: one CLIP text encoder, a UNet, and the VAE of factor 8 with 4 channels.

Sources: runwayml/stable-diffusion-v1-5 (vae/config.json: scaling_factor 0.18215, four down blocks, three of them
halving); 77 is the length of CLIP's position table. diffusers' UNet takes any size in whole latent cells: it resizes to
the sizes of its own way down. The usual step between buckets is 64 pixels, since three levels halve.

Skipped layers: the hidden states of an earlier layer go through the encoder's final norm, as `encode_prompt` of
diffusers 0.42 means to do; with transformers since 5.6 it raises, as the norm is no longer in `text_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from prep.models.configs import Configs
from prep.models.family import (
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    SamplePipeline,
    Shape,
    TextEncoding,
    TextOptions,
    TextRow,
)
from prep.models.lora.kohya import UNET
from prep.models.lora.unet import original_rules
from prep.models.text import clip

if TYPE_CHECKING:
    from torch import Tensor

FURTHER_INPUTS = ("addition_embed_type", "class_embed_type", "num_class_embeds", "encoder_hid_dim_type")  # of a UNet


def is_plain(unet: Mapping[str, Any]) -> bool:
    """Whether a UNet of this config takes a noisy latent, a timestep and text, and nothing else."""
    return all(unet.get(name) is None for name in FURTHER_INPUTS)


def fits(configs: Configs) -> bool:
    """Whether the UNet is that of Stable Diffusion 1, which projects pictures with convolutions."""
    return is_plain(configs("unet")) and configs("unet").get("use_linear_projection") in (None, False)


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]: the last layer of the text encoder that is not skipped, after the norm."""
    return {"hidden": (options.tokens, configs.width("text_encoder", "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption. Padding is part of it: the UNet's cross-attention has no mask."""
    if options.clip_skip or options.windows > 1:
        hidden_BLD = _by_hand(pipeline, captions, options, device)
    else:
        hidden_BLD, _ = pipeline.encode_prompt(list(captions), device, 1, False)
    return [{"hidden": hidden} for hidden in hidden_BLD]


def _by_hand(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Any:
    """Hidden states [B, L, D] of each window, side by side along L."""
    encoder = pipeline.text_encoder
    states = clip.encode(pipeline.tokenizer, encoder, captions, options, device).hidden_states
    return clip.joined(encoder.final_layer_norm(states[-(options.clip_skip + 1)]), options)


def without_prompt(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of "", once per window. As in diffusers, it skips no layers."""
    _, negative_1LD = pipeline.encode_prompt("", device, 1, True)
    return {"hidden": negative_1LD[0].repeat(options.windows, 1)}


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="full", max_length=77, shortest=77,
                    longest=77, shapes=shapes, encode=encode, without_prompt=without_prompt, clip=True, windows=True)


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(unet: Any, noised_BChw: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
    """The UNet's answer; it has no text mask."""
    answer_BChw: Tensor = unet(noised_BChw, timestep_B, conditions.text["hidden"]).sample
    return answer_BChw


def call(unet: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `StableDiffusionPipeline.__call__`."""
    return {"prompt_embeds": prompted.positive["hidden"], "negative_prompt_embeds": prompted.negative["hidden"],
            "latents": prompted.latent_1Chw, "guidance_scale": prompted.guidance}


def unpack(unet: Any, latent_1Chw: Tensor, size: Size) -> Tensor:
    """The pipeline's latents are as they should be."""
    return latent_1Chw


# DDIM: the same pictures for the same noise. Latents are unbounded, so no clipping, as in StableDiffusionPipeline.
SAMPLING = SamplePipeline(call=call, unpack=unpack, sampler="DDIMScheduler", sampler_options={"clip_sample": False},
                          guidance=7.5)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

_KOHYA = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # The linear layers of the transformer blocks; resnets and embeddings get no adapter, as in kohya's trainer.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
    # With the layers around the blocks, which are 1x1 convolutions or linear: what sd-scripts adapts without conv_dim.
    "kohya": _KOHYA,
    # With all layers of the resnets and samplers: what sd-scripts adapts with conv_dim, and LyCORIS as LoCon.
    "kohya-conv": (*_KOHYA, "conv1", "conv2", "conv_shortcut", "time_emb_proj", "re:samplers\\.0\\.conv$"),
}
LORA = LoraLayers(presets=PRESETS, kohya=UNET, original=original_rules)


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "CLIPTextModel"),),
    "tokenizer": (("transformers", "CLIPTokenizer"), ("transformers", "CLIPTokenizerFast")),
    "unet": (("diffusers", "UNet2DConditionModel"),),
    "vae": (("diffusers", "AutoencoderKL"),),
}
FAMILY = Family(
    name="sd15", models=("Stable Diffusion 1.x",), pipelines=("StableDiffusionPipeline",), fits=fits, denoiser="unet",
    components=COMPONENTS, latent_channels=4, factor=8, patch=1, step=64, resolution=512, scaling_factor="0.18215",
    shift_factor="0", predictions=("epsilon", "v_prediction"), text=TEXT, predict=predict, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="stable-diffusion-v1", version="sd_v1", v2=False),
    config_widths={"in_channels": ("latent", 1), "cross_attention_dim": ("hidden", 1)},
)
