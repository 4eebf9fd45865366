"""Lumina Image 2.0: the last layer but one of Gemma 2 for the tokens of a caption behind a system prompt; FLUX.1's VAE.

Sources: `Lumina2Pipeline.encode_prompt` in diffusers 0.42, which puts the system prompt before captions, but not before
negative prompts, and counts it in the 256 tokens of its default. `Lumina2Transformer2DModel` uses only the rows that
the mask keeps; it has positions for no more than 299 of them. The VAE's factors are FLUX.1's; the transformer takes
patches of 2 × 2 latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import flux
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow

# The pipeline's own, given to it again so that rows are what their keys say with any version of diffusers.
SYSTEM_PROMPT = ("You are an assistant designed to generate superior images with the superior degree of image-text "
                 "alignment based on textual prompts or user prompts.")


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of Gemma 2."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "hidden_size"))}


def longest_side(config: Mapping[str, Any]) -> int | None:
    """Pixels: the positions of a side, of patches of 2 × 2 latent cells."""
    positions = config.get("axes_lens", (300, 512, 512))
    sides = [side for side in positions[1:] if type(side) is int] if isinstance(positions, list | tuple) else []
    return min(sides) * 16 if sides else None


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, system prompt included, without padding."""
    hidden_BLD, mask_BL, _, _ = pipeline.encode_prompt(
        list(captions), do_classifier_free_guidance=False, device=device, system_prompt=SYSTEM_PROMPT,
        max_sequence_length=options.max_length)
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


def negative(pipeline: Any, texts: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per negative prompt: no system prompt is before it. Positive prompts are needed to ask for these."""
    _, _, hidden_BLD, mask_BL = pipeline.encode_prompt(
        [""] * len(texts), negative_prompt=list(texts), device=device, max_sequence_length=options.max_length)
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of "" without the system prompt."""
    return negative(pipeline, [""], options, device)[0]


TEXT = TextFacts(arrays={"hidden": ("token", "channel")}, layout="trimmed", max_length=256, longest=256, shapes=shapes,
                 encode=encode, negative=negative, unconditional=unconditional,
                 constants={"system_prompt": SYSTEM_PROMPT})
COMPONENTS = {
    "text_encoder": (("transformers", "Gemma2Model"),),
    "tokenizer": (("transformers", "GemmaTokenizer"), ("transformers", "GemmaTokenizerFast")),
    "transformer": (("diffusers", "Lumina2Transformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    # diffusers 0.33 called the pipeline Lumina2Text2ImgPipeline at first.
    name="lumina2", models=("Lumina Image 2.0",), pipelines=("Lumina2Pipeline", "Lumina2Text2ImgPipeline"),
    denoiser="transformer", components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024,
    scaling_factor="0.3611", shift_factor="0.1159", predictions=("flow",), text=TEXT,
    lora_formats=("diffusers", "kohya"),
    config_widths={"in_channels": ("latent", 1), "cap_feat_dim": ("hidden", 1)}, longest_side=longest_side,
)
