"""Stable Diffusion 3 and 3.5: two CLIPs and T5 in one row of tokens, and the VAE of factor 8 with 16 channels.

Sources: stabilityai/stable-diffusion-3-medium-diffusers (vae/config.json: scaling_factor 1.5305, shift_factor 0.0609);
`StableDiffusion3Pipeline.encode_prompt` in diffusers 0.42: the 77 tokens of both CLIPs side by side, padded with zeros
to T5's width, then T5's tokens; no part has an attention mask, so padding is part of a row. Many leave T5 out: the
pipeline then has zeros in its place, as wide as the transformer says. `SD3Transformer2DModel` takes patches of 2 × 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import flux, sd15
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow

CLIP_TOKENS = 77  # the length of CLIP's position tables
LAST, JOINT = "text_encoder_3", "joint_attention_dim"


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]: 77 tokens of both CLIPs, then `max_length` of T5; `pooled` [channel] of both CLIPs."""
    width = configs.width(LAST, "d_model") if configs.has(LAST) else configs.width("transformer", JOINT)
    pooled = sum(configs.width(name, "projection_dim") for name in ("text_encoder", "text_encoder_2"))
    return {"hidden": (CLIP_TOKENS + options.max_length, width), "pooled": (pooled,)}


def denoiser_config(configs: Configs) -> Mapping[str, int]:
    """The width of the zeros that stand for T5; nothing if there is T5, which has a width of its own."""
    return {} if configs.has(LAST) else {JOINT: configs.width("transformer", JOINT)}


def longest_side(config: Mapping[str, Any]) -> int | None:
    """Pixels: `pos_embed_max_size` patches of 2 × 2 latent cells; without a table, any size."""
    patches = config.get("pos_embed_max_size", 96)
    return patches * 16 if type(patches) is int else None


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` and one `pooled` per caption; all encoders read the same caption."""
    hidden_BLD, _, pooled_BD, _ = pipeline.encode_prompt(
        prompt=list(captions), prompt_2=None, prompt_3=None, device=device, do_classifier_free_guidance=False,
        clip_skip=options.clip_skip or None, max_sequence_length=options.max_length)
    return [{"hidden": hidden, "pooled": pooled} for hidden, pooled in zip(hidden_BLD, pooled_BD, strict=True)]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of "", to which a clip_skip does not apply in diffusers either."""
    _, hidden_1LD, _, pooled_1D = pipeline.encode_prompt(
        prompt="", prompt_2=None, prompt_3=None, device=device, do_classifier_free_guidance=True,
        max_sequence_length=options.max_length)
    return {"hidden": hidden_1LD[0], "pooled": pooled_1D[0]}


TEXT = TextFacts(arrays={"hidden": ("token", "channel"), "pooled": ("channel",)}, layout="full", max_length=256,
                 longest=512, shapes=shapes, encode=encode, unconditional=unconditional,
                 denoiser_config=denoiser_config, clip=True)
PROJECTED_CLIP = (("transformers", "CLIPTextModelWithProjection"),)
COMPONENTS = {
    "text_encoder": PROJECTED_CLIP,
    "text_encoder_2": PROJECTED_CLIP,
    "text_encoder_3": flux.COMPONENTS["text_encoder_2"],
    "tokenizer": sd15.COMPONENTS["tokenizer"],
    "tokenizer_2": sd15.COMPONENTS["tokenizer"],
    "tokenizer_3": flux.T5_TOKENIZERS,
    "transformer": (("diffusers", "SD3Transformer2DModel"),),
    "vae": (("diffusers", "AutoencoderKL"),),
}
FAMILY = Family(
    name="sd3", models=("Stable Diffusion 3.x",), pipelines=("StableDiffusion3Pipeline",),
    denoiser="transformer", buffers=frozenset({"pos_embed.pos_embed"}), components=COMPONENTS,
    optional=frozenset({"text_encoder_3", "tokenizer_3"}),
    latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="1.5305", shift_factor="0.0609",
    predictions=("flow",), text=TEXT,
    lora_formats=("diffusers", "kohya"),
    published={"": {LAST: ["transformers", "T5EncoderModel"]}, "text_encoder": {"projection_dim": 768},
               "text_encoder_2": {"projection_dim": 1280}, LAST: {"d_model": 4096}},
    config_widths={"in_channels": ("latent", 1), "joint_attention_dim": ("hidden", 1),
                   "pooled_projection_dim": ("pooled", 1)}, longest_side=longest_side,
)
