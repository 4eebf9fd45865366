"""Stable Diffusion 1.x: one CLIP text encoder, a UNet, and the VAE of factor 8 with 4 channels.

Sources: runwayml/stable-diffusion-v1-5 (vae/config.json: scaling_factor 0.18215, four down blocks, three of them
halving); 77 is the length of CLIP's position table. diffusers' UNet takes any size in whole latent cells: it resizes to
the sizes of its own way down. The usual step between buckets is 64 pixels, since three levels halve.

Skipped layers: the hidden states of an earlier layer go through the encoder's final norm, as `encode_prompt` of
diffusers 0.42 means to do; with transformers 5.6 and later it raises, since the norm is no longer in `text_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow
from prep.models.text import clip

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
    norm = getattr(encoder, "text_model", encoder).final_layer_norm  # transformers 5.6 has no text_model
    return clip.joined(norm(states[-(options.clip_skip + 1)]), options)


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of "", once per window. As in diffusers, it skips no layers."""
    _, negative_1LD = pipeline.encode_prompt("", device, 1, True)
    return {"hidden": negative_1LD[0].repeat(options.windows, 1)}


TEXT = TextFacts(arrays={"hidden": ("token", "channel")}, layout="full", max_length=77, shortest=77,
                 longest=77, shapes=shapes, encode=encode, unconditional=unconditional, clip=True, windows=True)
COMPONENTS = {
    "text_encoder": (("transformers", "CLIPTextModel"),),
    "tokenizer": (("transformers", "CLIPTokenizer"), ("transformers", "CLIPTokenizerFast")),
    "unet": (("diffusers", "UNet2DConditionModel"),),
    "vae": (("diffusers", "AutoencoderKL"),),
}
FAMILY = Family(
    name="sd15", models=("Stable Diffusion 1.x",), pipelines=("StableDiffusionPipeline",), fits=fits, denoiser="unet",
    components=COMPONENTS, latent_channels=4, factor=8, patch=1, step=64, resolution=512, scaling_factor="0.18215",
    shift_factor="0", predictions=("epsilon", "v_prediction"), text=TEXT, lora_formats=("kohya", "diffusers"),
    published={"text_encoder": {"hidden_size": 768}},
    config_widths={"in_channels": ("latent", 1), "cross_attention_dim": ("hidden", 1)},
)
