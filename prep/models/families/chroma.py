"""Chroma: T5 for the tokens, without CLIP, and FLUX.1's VAE.

Sources: `ChromaPipeline.encode_prompt` in diffusers 0.42. Unlike FLUX.1's, its T5 sees the tokenizer's mask, and its
transformer is to attend to a caption's tokens and to one padding token behind them (lodestones/Chroma, "masking T5
padding tokens"): rows are stored with that token and without the others. 512 tokens, padding token included, are the
pipeline's default and its most. The VAE's factors are FLUX.1's; the transformer takes patches of 2 × 2 latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import flux
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of T5."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "d_model"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption: its tokens, and one of padding unless it fills the row."""
    hidden_BLD, _, mask_BL, *_ = pipeline.encode_prompt(
        list(captions), device=device, do_classifier_free_guidance=False, max_sequence_length=options.max_length)
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of ""."""
    return encode(pipeline, [""], options, device)[0]


TEXT = TextFacts(arrays={"hidden": ("token", "channel")}, layout="trimmed", padding_masked=True,
                 max_length=512, longest=512, shapes=shapes, encode=encode, unconditional=unconditional)
COMPONENTS = {
    "text_encoder": (("transformers", "T5EncoderModel"),),
    "tokenizer": flux.T5_TOKENIZERS,
    "transformer": (("diffusers", "ChromaTransformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    name="chroma", models=("Chroma",), pipelines=("ChromaPipeline",), denoiser="transformer", components=COMPONENTS,
    latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.3611", shift_factor="0.1159",
    lora_formats=("diffusers", "kohya"),
    predictions=("flow",), text=TEXT,
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
