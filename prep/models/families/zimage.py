"""Z-Image and Z-Image-Turbo: the last layer but one of Qwen3 for the tokens of the caption alone, and FLUX.1's VAE.

Sources: `ZImagePipeline.encode_prompt` in diffusers 0.42, which writes the caption into the tokenizer's chat template
(part of the text fingerprint) and returns a list of rows without padding; `ZImageTransformer2DModel` there, which pads
each row with tokens of its own, so a stored padding row would be text to it. 512 tokens, template included, are the
pipeline's default. The VAE's factors are FLUX.1's; the transformer takes patches of 2 × 2 latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import flux
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without padding."""
    rows, _ = pipeline.encode_prompt(list(captions), device=device, do_classifier_free_guidance=False,
                                     max_sequence_length=options.max_length)
    return [{"hidden": hidden_LD} for hidden_LD in rows]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of ""."""
    return encode(pipeline, [""], options, device)[0]


TEXT = TextFacts(arrays={"hidden": ("token", "channel")}, layout="trimmed", padding_masked=True,
                 max_length=512, longest=512, shapes=shapes, encode=encode, unconditional=unconditional)
COMPONENTS = {
    "text_encoder": (("transformers", "Qwen3Model"), ("transformers", "Qwen3ForCausalLM")),
    "tokenizer": (("transformers", "Qwen2Tokenizer"), ("transformers", "Qwen2TokenizerFast")),
    "transformer": (("diffusers", "ZImageTransformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    name="zimage", models=("Z-Image", "Z-Image-Turbo"), pipelines=("ZImagePipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.3611",
    shift_factor="0.1159", predictions=("flow",), text=TEXT, lora_formats=("diffusers", "kohya"),
    config_widths={"in_channels": ("latent", 1), "cap_feat_dim": ("hidden", 1)},
)
