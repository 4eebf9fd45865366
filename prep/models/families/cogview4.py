"""CogView4: the last layer but one of GLM for the tokens of a caption, and a VAE whose latents need no scaling.

Sources: `CogView4Pipeline` in diffusers 0.42, whose `encode_prompt` pads the longest caption of a batch on the left to
a multiple of 16 tokens, and the others to the same length. Neither GLM nor the transformer masks this padding, so a row
depends on the captions beside it: each is encoded alone, as for one picture. 1024 tokens are the pipeline's default;
the transformer takes patches of 2 × 2 latent cells. The VAE of THUDM/CogView4-6B has a scaling factor of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import flux
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow

MULTIPLE = 16  # of tokens


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of GLM. Captions are cut off before they are padded."""
    return {"hidden": (-(-options.max_length // MULTIPLE) * MULTIPLE, configs.width("text_encoder", "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, with the padding of that caption alone."""
    rows = [pipeline.encode_prompt([caption], do_classifier_free_guidance=False, device=device,
                                   max_sequence_length=options.max_length)[0] for caption in captions]
    return [{"hidden": hidden_1LD[0]} for hidden_1LD in rows]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of ""."""
    return encode(pipeline, [""], options, device)[0]


TEXT = TextFacts(arrays={"hidden": ("token", "channel")}, layout="trimmed", max_length=1024, longest=1024,
                 shapes=shapes, encode=encode, unconditional=unconditional)
COMPONENTS = {
    "text_encoder": (("transformers", "GlmModel"), ("transformers", "GlmForCausalLM")),
    # The second is what transformers 5 calls the first.
    "tokenizer": (("transformers", "PreTrainedTokenizerFast"), ("transformers", "TokenizersBackend")),
    "transformer": (("diffusers", "CogView4Transformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    name="cogview4", models=("CogView4",), pipelines=("CogView4Pipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024,
    scaling_factor="1", shift_factor="0", predictions=("flow",), text=TEXT,
    config_widths={"in_channels": ("latent", 1), "text_embed_dim": ("hidden", 1)},
)
