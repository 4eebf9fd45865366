"""Ovis-Image: Qwen3 for the tokens of a caption behind a system prompt, and FLUX.1's VAE.

Sources: `OvisImagePipeline` in diffusers 0.42. `encode_prompt` writes system prompt and caption into the tokenizer's
chat template (part of the text fingerprint), cuts off the first 28 tokens, and sets the rest of a row to zeros where
the caption ends. 256 tokens are its default and its most. Nothing masks these zeros, and tokens are numbered, so a
row has all of them. The VAE's factors are FLUX.1's; the transformer takes patches of 2 × 2 latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import flux
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow

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


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of "", system prompt included."""
    return encode(pipeline, [""], options, device)[0]


TEXT = TextFacts(arrays={"hidden": ("token", "channel")}, layout="full", max_length=256, longest=256, shapes=shapes,
                 encode=encode, unconditional=unconditional,
                 constants={"system_prompt": SYSTEM_PROMPT, "template_tokens": TEMPLATE_TOKENS})
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
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
