"""PixArt Alpha and Sigma: T5 for the tokens, a transformer with masked cross-attention, and VAEs of SD and of SDXL.

They are two families: Alpha has learned from 120 tokens and has SD's VAE, Sigma from 300 and has SDXL's, so neither the
text rows nor the latents of one serve the other.

Sources: PixArt-alpha/PixArt-alpha configs/PixArt_xl2_internal.py (model_max_length 120, scale_factor 0.18215);
PixArt-alpha/PixArt-sigma configs/pixart_sigma_config (model_max_length 300, scale_factor 0.13025);
`encode_prompt` of both pipelines in diffusers 0.42, whose defaults are these lengths. The transformer takes patches of
2 × 2 latent cells. Cross-attention ignores padding, so rows are stored without it.

`encode_prompt` lower-cases captions. The pipelines' `clean_caption`, on by default, also removes words and signs, if
beautifulsoup4 and ftfy are installed; here it is always off, so that rows do not depend on installed packages. The keys
say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import flux
from prep.models.family import Class, Family, Shape, TextFacts, TextOptions, TextRow


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of T5."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "d_model"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without padding."""
    hidden_BLD, mask_BL, _, _ = pipeline.encode_prompt(
        list(captions), do_classifier_free_guidance=False, device=device, clean_caption=False,
        max_sequence_length=options.max_length)
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of ""."""
    return encode(pipeline, [""], options, device)[0]


def _text(max_length: int) -> TextFacts:
    return TextFacts(arrays={"hidden": ("token", "channel")}, layout="trimmed", padding_masked=True,
                     max_length=max_length, longest=max_length, shapes=shapes, encode=encode,
                     unconditional=unconditional, constants={"clean_caption": 0})


COMPONENTS: Mapping[str, tuple[Class, ...]] = {
    "text_encoder": (("transformers", "T5EncoderModel"),),
    "tokenizer": flux.T5_TOKENIZERS,
    # Alpha was published before its transformer had a class of its own; diffusers loads both names as that class.
    "transformer": (("diffusers", "PixArtTransformer2DModel"), ("diffusers", "Transformer2DModel")),
    "vae": (("diffusers", "AutoencoderKL"),),
}
ALPHA = Family(
    name="pixart_alpha", models=("PixArt Alpha",), pipelines=("PixArtAlphaPipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=4, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.18215",
    shift_factor="0", predictions=("epsilon",), text=_text(120),
    config_widths={"in_channels": ("latent", 1), "caption_channels": ("hidden", 1)},
)
SIGMA = Family(
    name="pixart_sigma", models=("PixArt Sigma",), pipelines=("PixArtSigmaPipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=4, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.13025",
    shift_factor="0", predictions=("epsilon",), text=_text(300),
    config_widths={"in_channels": ("latent", 1), "caption_channels": ("hidden", 1)},
)
