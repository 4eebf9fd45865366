"""AuraFlow: UMT5 for the tokens, and SDXL's VAE.

Sources: `AuraFlowPipeline.encode_prompt` in diffusers 0.42: 256 tokens, those of padding set to zero. The transformer
attends to them all, so padding is part of a row. fal/AuraFlow (vae/config.json: scaling_factor 0.13025; its tokenizer,
that of EleutherAI/pile-t5-xl, is saved as Llama's). The transformer takes patches of 2 × 2 latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from prep.models.configs import Configs
from prep.models.families import flux
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of UMT5."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "d_model"))}


def longest_side(config: Mapping[str, Any]) -> int | None:
    """Pixels: the table has `pos_embed_max_size` patches of 2 × 2 latent cells, in a square."""
    patches = config.get("pos_embed_max_size", 1024)  # as in the class of diffusers
    return isqrt(patches) * 16 if type(patches) is int and patches > 0 else None


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, with zeros for padding."""
    hidden_BLD, _, _, _ = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False, device=device,
                                                 max_sequence_length=options.max_length)
    return [{"hidden": hidden} for hidden in hidden_BLD]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of ""."""
    return encode(pipeline, [""], options, device)[0]


TEXT = TextFacts(arrays={"hidden": ("token", "channel")}, layout="full", max_length=256, longest=256, shapes=shapes,
                 encode=encode, unconditional=unconditional)
COMPONENTS = {
    "text_encoder": (("transformers", "UMT5EncoderModel"),),
    "tokenizer": (*flux.T5_TOKENIZERS, ("transformers", "LlamaTokenizer"), ("transformers", "LlamaTokenizerFast")),
    "transformer": (("diffusers", "AuraFlowTransformer2DModel"),),
    "vae": (("diffusers", "AutoencoderKL"),),
}
FAMILY = Family(
    name="auraflow", models=("AuraFlow",), pipelines=("AuraFlowPipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=4, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.13025",
    shift_factor="0", predictions=("flow",), upcasts_vae=True, text=TEXT,
    lora_formats=("diffusers", "kohya"),
    config_widths={"in_channels": ("latent", 1), "joint_attention_dim": ("hidden", 1)}, longest_side=longest_side,
)
