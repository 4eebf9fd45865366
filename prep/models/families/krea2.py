"""Krea 2 (Raw, Turbo): twelve layers of Qwen3-VL for each token of the caption, and Qwen-Image's VAE.

Sources: `Krea2Pipeline` in diffusers 0.42: `encode_prompt` writes the caption into Qwen-Image's template, cuts off the
rows of its first 34 tokens, and puts the five after the caption behind the padding. Its default is 512 tokens with
these five. model_index.json may name other layers than its default. `Krea2Transformer2DModel` masks padding wherever
tokens attend to each other, and all text tokens have the same position, so rows are stored without padding. It takes
patches of 2 × 2 latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.errors import ModelError
from prep.models.configs import Configs
from prep.models.families import qwenimage
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow
from prep.models.files import FETCH_AGAIN
from prep.parse import brief

LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)  # hidden states; the first is that of the embeddings
SELECTED = "text_encoder_select_layers"
MOST_LAYERS = 128
PREFIX, SUFFIX = qwenimage.TEMPLATE.split("{}")
SUFFIX_TOKENS = 5


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`layers` [token, layer, channel]."""
    width = configs.width("text_encoder", "text_config", "hidden_size")
    return {"layers": (options.max_length, len(selected(configs)), width)}


def selected(configs: Configs) -> Sequence[int]:
    """The layers that model_index.json names, or the pipeline's default. Raises `ModelError`."""
    found = configs.value(SELECTED)
    if found is None:
        return LAYERS
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_LAYERS or not all(
            type(number) is int and 0 <= number <= MOST_LAYERS for number in found):
        raise ModelError(f"{configs.model / 'model_index.json'} has {SELECTED} {brief(found)}, expected a list of "
                         f"1 to {MOST_LAYERS} numbers from 0 to {MOST_LAYERS}", hint=FETCH_AGAIN)
    return found


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `layers` per caption, without the padding between it and the end of the template."""
    layers_BLND, mask_BL = pipeline.encode_prompt(list(captions), device=device, max_sequence_length=options.max_length)
    return [{"layers": layers[mask]} for layers, mask in zip(layers_BLND, mask_BL.bool(), strict=True)]


def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of ""."""
    return encode(pipeline, [""], options, device)[0]


TEXT = TextFacts(arrays={"layers": ("token", "layer", "channel")}, layout="trimmed", max_length=512,
                 shortest=SUFFIX_TOKENS + 1, longest=512, shapes=shapes, encode=encode, unconditional=unconditional,
                 pipeline_options=(SELECTED,),
                 constants={"layers": ",".join(map(str, LAYERS)), "prefix": PREFIX, "suffix": SUFFIX,
                            "dropped": qwenimage.DROPPED, "suffix_tokens": SUFFIX_TOKENS})
COMPONENTS = {
    "text_encoder": (("transformers", "Qwen3VLModel"), ("transformers", "Qwen3VLForConditionalGeneration")),
    "tokenizer": qwenimage.COMPONENTS["tokenizer"],
    "transformer": (("diffusers", "Krea2Transformer2DModel"),),
    "vae": qwenimage.COMPONENTS["vae"],
}
FAMILY = Family(
    name="krea2", models=("Krea 2",), pipelines=("Krea2Pipeline",), denoiser="transformer", components=COMPONENTS,
    latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="1", shift_factor="0",
    predictions=("flow",), text=TEXT,
    lora_formats=("diffusers", "kohya"),
    config_widths={"in_channels": ("latent", 4), "text_hidden_dim": ("layers", 1)},
)
