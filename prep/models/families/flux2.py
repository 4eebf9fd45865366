"""FLUX.2 dev and klein: three layers of a language model side by side, and a VAE normalized by a batch norm.

They are two families: dev has Mistral 3, a message that tells it what to do, and guidance as an input; klein has Qwen3,
other layers, and negative prompts. Neither text rows nor samplers of one serve the other. Latents are the same.

Sources: `Flux2Pipeline` and `Flux2KleinPipeline` in diffusers 0.42, whose defaults are the layers and the 512 tokens,
template included. dev pads on the left, klein on the right. `Flux2Transformer2DModel` gets no mask, and the position
of a token is its place in the row, so padding is part of a row. It takes patches of 2 × 2 latent cells. The text
encoder is black-forest-labs/FLUX.2-dev's; its tokenizer is inside a PixtralProcessor, whose pictures dev does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prep.models.configs import Configs
from prep.models.families import zimage
from prep.models.family import Family, Shape, TextFacts, TextOptions, TextRow

# Hidden states that are read; the first is that of the embeddings.
DEV_LAYERS, KLEIN_LAYERS = (10, 20, 30), (9, 18, 27)
SYSTEM = ("You are an AI that reasons about image descriptions. You give structured responses focusing on object "
          "relationships, object\nattribution and actions without speculation.")


def dev_shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]: the layers of a token are side by side."""
    width = configs.width("text_encoder", "text_config", "hidden_size")
    return {"hidden": (options.max_length, len(DEV_LAYERS) * width)}


def klein_shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]: the layers of a token are side by side."""
    return {"hidden": (options.max_length, len(KLEIN_LAYERS) * configs.width("text_encoder", "hidden_size"))}


def _text(shapes: Callable[[Configs, TextOptions], Mapping[str, Shape]], layers: tuple[int, ...],
          constants: Mapping[str, str | int]) -> TextFacts:
    def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
        """One `hidden` per caption. Positions of text tokens follow from their order, so they are not stored."""
        hidden_BLD, _ = pipeline.encode_prompt(list(captions), device=device, max_sequence_length=options.max_length,
                                               text_encoder_out_layers=layers)
        return [{"hidden": hidden_LD} for hidden_LD in hidden_BLD]

    def unconditional(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
        """The encoding of "": the own negative of klein's pipeline; dev's has none."""
        return encode(pipeline, [""], options, device)[0]

    return TextFacts(arrays={"hidden": ("token", "channel")}, layout="full", max_length=512, longest=512, shapes=shapes,
                     encode=encode, unconditional=unconditional,
                     constants={"layers": ",".join(map(str, layers)), **constants})


PICTURES = {
    "transformer": (("diffusers", "Flux2Transformer2DModel"),),
    "vae": (("diffusers", "AutoencoderKLFlux2"),),
}
MISTRAL_TOKENIZERS = (("transformers", "PixtralProcessor"), ("transformers", "TokenizersBackend"),
                      ("transformers", "PreTrainedTokenizerFast"))
DEV = Family(
    name="flux2", models=("FLUX.2 dev",), pipelines=("Flux2Pipeline",), denoiser="transformer",
    components={"text_encoder": (("transformers", "Mistral3ForConditionalGeneration"),),
                "tokenizer": MISTRAL_TOKENIZERS, **PICTURES},
    latent_channels=32, factor=8, patch=2, step=64, resolution=1024, scaling_factor="1", shift_factor="0",
    lora_formats=("diffusers", "kohya"),
    predictions=("flow",), text=_text(dev_shapes, DEV_LAYERS, {"system": SYSTEM}),
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
KLEIN = Family(
    name="flux2_klein", models=("FLUX.2 klein 4B", "FLUX.2 klein 9B"), pipelines=("Flux2KleinPipeline",),
    denoiser="transformer",
    components={"text_encoder": (("transformers", "Qwen3ForCausalLM"),),
                "tokenizer": zimage.COMPONENTS["tokenizer"], **PICTURES},
    latent_channels=32, factor=8, patch=2, step=64, resolution=1024, scaling_factor="1", shift_factor="0",
    lora_formats=("diffusers", "kohya"),
    predictions=("flow",), text=_text(klein_shapes, KLEIN_LAYERS, {}),
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
