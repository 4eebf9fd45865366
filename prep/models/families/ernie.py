"""ERNIE-Image: the last layer but one of Mistral 3 for the tokens of the caption, and FLUX.2's VAE.

Sources: `ErnieImagePipeline` in diffusers 0.42: `encode_prompt` encodes each caption alone, without a template, and
returns a list of rows without padding; it cuts captions only where the tokenizer does. The language model is causal,
so a row cut later is that of a caption cut before. `ErnieImageTransformer2DModel` masks padding, and its positions
follow from each caption's own length. It takes FLUX.2's patches of 2 × 2 latent cells.

The pipeline normalizes latents with an epsilon of 1e-5, whatever the VAE's config says, as the model was trained. The
prompt enhancer that may be in its directory (`pe`) is not used: training sees captions as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import flux2
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "text_config", "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without padding."""
    return [{"hidden": hidden_LD[:options.max_length]}
            for hidden_LD in pipeline.encode_prompt(list(captions), device=device)]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of ""."""
    return encode(pipeline, [""], options, device)[0]


# 2048 tokens are more than captions have; a longer caption would be whole in the pipeline.
TEXT = TextFacts(arrays={"hidden": ("token", "channel")}, layout="trimmed", max_length=2048, longest=2048,
                 shapes=shapes, encode=encode, unconditional=unconditional)
COMPONENTS = {
    "text_encoder": (("transformers", "Mistral3Model"),),
    "tokenizer": (*flux2.MISTRAL_TOKENIZERS, ("transformers", "LlamaTokenizerFast"),
                  ("transformers", "LlamaTokenizer")),
    "transformer": (("diffusers", "ErnieImageTransformer2DModel"),),
    "vae": flux2.PICTURES["vae"],
}
FAMILY = Family(
    name="ernie", models=("ERNIE-Image",), pipelines=("ErnieImagePipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=32, factor=8, patch=2, step=64, resolution=1024, scaling_factor="1",
    shift_factor="0", batch_norm_eps=1e-5, predictions=("flow",), text=TEXT,
    lora_formats=("diffusers", "kohya"),
    config_widths={"in_channels": ("latent", 4), "text_in_dim": ("hidden", 1)},
)
