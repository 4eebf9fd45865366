"""FLUX.1 (dev, schnell): T5 for the tokens, CLIP for one pooled vector, and the VAE of factor 8 with 16 channels.

Sources: black-forest-labs/FLUX.1-dev (vae/config.json: scaling_factor 0.3611, shift_factor 0.1159); the transformer
takes patches of 2 × 2 latent cells; `FluxPipeline.encode_prompt` in diffusers 0.42, whose T5 sees no attention mask, so
padding is part of a row. dev has learned from 512 tokens and schnell from 256: set model.max_length for schnell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import sd15
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow

T5_TOKENIZERS = (("transformers", "T5TokenizerFast"), ("transformers", "T5Tokenizer"))


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of T5, and `pooled` [channel] of CLIP."""
    return {"hidden": (options.max_length, configs.width("text_encoder_2", "d_model")),
            "pooled": (configs.width("text_encoder", "hidden_size"),)}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` and one `pooled` per caption. The positions of text tokens are all zero, so they are not stored."""
    hidden_BLD, pooled_BD, _ = pipeline.encode_prompt(prompt=list(captions), prompt_2=None, device=device,
                                                      max_sequence_length=options.max_length)
    return [{"hidden": hidden, "pooled": pooled} for hidden, pooled in zip(hidden_BLD, pooled_BD, strict=True)]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The encoding of "": the pipeline has no negative of its own, since guidance is an input of the model."""
    return encode(pipeline, [""], options, device)[0]


TEXT = TextFacts(arrays={"hidden": ("token", "channel"), "pooled": ("channel",)}, layout="full", max_length=512,
                 longest=512, shapes=shapes, encode=encode, unconditional=unconditional)
COMPONENTS = {
    "text_encoder": sd15.COMPONENTS["text_encoder"],
    "text_encoder_2": (("transformers", "T5EncoderModel"),),
    "tokenizer": sd15.COMPONENTS["tokenizer"],
    "tokenizer_2": T5_TOKENIZERS,
    "transformer": (("diffusers", "FluxTransformer2DModel"),),
    "vae": (("diffusers", "AutoencoderKL"),),
}
FAMILY = Family(
    name="flux", models=("FLUX.1 dev", "FLUX.1 schnell"), pipelines=("FluxPipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.3611",
    shift_factor="0.1159", predictions=("flow",), text=TEXT, lora_formats=("diffusers", "kohya"),
    published={"text_encoder": {"hidden_size": 768}, "text_encoder_2": {"d_model": 4096}},
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1),
                   "pooled_projection_dim": ("pooled", 1)},
)
