"""FLUX.2 dev and klein: three layers of a language model side by side, and a VAE normalized by a batch norm.

They are two families: dev has Mistral 3, a message that tells it what to do, and guidance as an input; klein has Qwen3,
other layers, and negative prompts. Neither text rows nor samplers of one serve the other. Latents are the same.

Sources: `Flux2Pipeline` and `Flux2KleinPipeline` in diffusers 0.42, whose defaults are the layers and the 512 tokens,
template included. dev pads on the left, klein on the right. `Flux2Transformer2DModel` gets no mask, and the position
of a token is its place in the row, so padding is part of a row. It takes patches of 2 × 2 latent cells. The text
encoder is black-forest-labs/FLUX.2-dev's; its tokenizer is inside a PixtralProcessor, whose pictures dev does not use.

The transformer takes text tokens and packed latents; that of dev also takes guidance as a number. Latents of pictures
that are conditions come behind those of the noise, 10, 20, … from it on the first axis of positions
(`Flux2Pipeline._prepare_image_ids`); text rows are the same with and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prep.geometry import Placement, Size
from prep.models.configs import Configs
from prep.models.denoiser import packing
from prep.models.families import flux, sd15, zimage
from prep.models.family import (
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    References,
    Shape,
    TextEncoding,
    TextOptions,
    TextRow,
)
from prep.models.lora.kohya import Kohya, Rule, renamed

if TYPE_CHECKING:
    from torch import Tensor

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
          constants: Mapping[str, str | int]) -> TextEncoding:
    def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
        """One `hidden` per caption. Positions of text tokens follow from their order, so they are not stored."""
        hidden_BLD, _ = pipeline.encode_prompt(list(captions), device=device, max_sequence_length=options.max_length,
                                               text_encoder_out_layers=layers)
        return [{"hidden": hidden_LD} for hidden_LD in hidden_BLD]

    return TextEncoding(arrays={"hidden": ("token", "channel")}, layout="full", max_length=512, longest=512,
                        shapes=shapes, encode=encode, constants={"layers": ",".join(map(str, layers)), **constants})


# ---- the denoiser ----------------------------------------------------------------------------------------------------

FACTOR = 8  # pixels per latent cell and side
AXES = 4  # of positions: time, row, column, place in the text


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma and guidance by 1000 itself."""
    count, hidden_BLD, patches_BNP = len(noised_BChw), conditions.text["hidden"], packing.pack(noised_BChw)
    packed = transformer(
        **append({"hidden_states": patches_BNP,
                  "img_ids": packing.positions(noised_BChw, AXES).expand(count, -1, -1)}, conditions.references),
        timestep=sigma_B, guidance=flux.guidance_of(transformer, sigma_B, conditions), encoder_hidden_states=hidden_BLD,
        txt_ids=places(hidden_BLD).expand(count, -1, -1), return_dict=False)[0]
    return packing.unpack(packed[:, :patches_BNP.shape[1]], (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def append(given: Mapping[str, Any], references: Sequence[Tensor]) -> Mapping[str, Any]:
    """The arguments of the transformer with references."""
    return packing.with_references(given, references, apart=10)


def places(hidden_BLD: Tensor) -> Tensor:
    """[L, 4] float32: the place of each text token on the last axis, zero on the others."""
    length = hidden_BLD.shape[1]
    ids = hidden_BLD.new_zeros((length, AXES)).float()
    ids[:, -1] = ids.new_tensor(range(length))
    return ids


def patches(latent_BChw: Tensor) -> Tensor:
    """[B, 4·C, h/2, w/2]: the numbers of a patch as channels, as FLUX.2's pipelines take latents."""
    count, _, height, width = latent_BChw.shape
    return packing.pack(latent_BChw).transpose(1, 2).reshape(count, -1, height // packing.PATCH, width // packing.PATCH)


def call_dev(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `Flux2Pipeline.__call__`: guidance is the model's own number, and no negative is used."""
    return {"prompt_embeds": prompted.positive["hidden"], "latents": patches(prompted.latent_1Chw),
            "guidance_scale": prompted.guidance}


def call_klein(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `Flux2KleinPipeline.__call__`. If model_index.json says that it is distilled, it does not guide."""
    return {**call_dev(transformer, prompted), "negative_prompt_embeds": prompted.negative["hidden"]}


def without_statistics(transformer: Any) -> SimpleNamespace:
    """Stands for the VAE in klein's pipeline, which applies its batch norm to latents, too: here it changes nothing."""
    like = next(transformer.parameters()).float()
    mean = like.new_zeros(transformer.config.in_channels)
    return SimpleNamespace(bn=SimpleNamespace(running_mean=mean, running_var=mean + 1),
                           config=SimpleNamespace(batch_norm_eps=0.0))


DEV_SAMPLING = replace(flux.SAMPLING, call=call_dev, guidance=4.0)  # the pipeline's default
KLEIN_SAMPLING = replace(DEV_SAMPLING, call=call_klein, unpack=sd15.unpack, vae=without_statistics)


# ---- pictures that are conditions ------------------------------------------------------------------------------------

SHORTEST, NARROWEST = 64, 8  # pixels of a side, and longest side to shortest, that the pipelines take
MULTIPLE = FACTOR * packing.PATCH  # pixels of a token's side


def place(size: Size, side: int) -> Placement | None:
    """Scaled down to the area of a square of this side, if it is larger, then cropped to whole tokens.

    In the floats of `Flux2ImageProcessor._resize_to_target_area`, which make 1023 pixels of 1040, and so 63 tokens: it
    is what the model sees when it is used. Their operations are rounded exactly, so they are the same everywhere.
    """
    narrow = min(size) < SHORTEST or max(size) > NARROWEST * min(size)
    return None if narrow else fitted(size, side)


def fitted(size: Size, side: int) -> Placement | None:
    """The same for sizes of any shape; None: it is smaller than a token."""
    width, height = size
    if width * height > side**2:
        scale = sqrt(side**2 / (width * height))
        width, height = int(width * scale), int(height * scale)
    bucket = width // MULTIPLE * MULTIPLE, height // MULTIPLE * MULTIPLE
    if 0 in bucket:
        return None
    return Placement(scaled=(width, height), crop=((width - bucket[0]) // 2, (height - bucket[1]) // 2), bucket=bucket)


# The pipelines take any number; these are those of docs.bfl.ml/guides/prompting_editing_overview ("recommended max 6"
# for dev, "up to 4" for klein).
DEV_REFERENCES = References(most=6, resolution=1024, place=place, append=append)
KLEIN_REFERENCES = replace(DEV_REFERENCES, most=4)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

# Image and text projections of the attention in double blocks; single blocks have one layer for those and their
# feed-forward part, and one for both outputs.
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
             "to_qkv_mlp_proj", "attn.to_out")
PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ATTENTION,
    "all-linear": (*ATTENTION, "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
}
KOHYA = Kohya(module="networks.lora_flux_2", rules=(
    *flux.RULES,
    *renamed(r"transformer_blocks\.(\d+)",
             "ff.linear_in=double_blocks.{}.img_mlp.0 ff.linear_out=double_blocks.{}.img_mlp.2 "
             "ff_context.linear_in=double_blocks.{}.txt_mlp.0 ff_context.linear_out=double_blocks.{}.txt_mlp.2"),
    *renamed(r"single_transformer_blocks\.(\d+)",
             "attn.to_qkv_mlp_proj=single_blocks.{}.linear1 attn.to_out=single_blocks.{}.linear2"),
))
FURTHER = (
    *flux.FURTHER,
    Rule(layer=r"(double_stream_modulation_img|double_stream_modulation_txt|single_stream_modulation)\.linear",
         name="{}.lin"),
)
LORA = LoraLayers(presets=PRESETS, kohya=KOHYA, further=FURTHER)


# ---- the family ------------------------------------------------------------------------------------------------------

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
    latent_channels=32, factor=FACTOR, patch=2, step=64, resolution=1024, scaling_factor="1", shift_factor="0",
    predictions=("flow",), predict=predict, chooses_attention=True, takes_guidance=True,
    text=_text(dev_shapes, DEV_LAYERS, {"system": SYSTEM}), sampling=DEV_SAMPLING, references=DEV_REFERENCES, lora=LORA,
    labels=Labels(architecture="flux.2-dev"),
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
KLEIN = Family(
    name="flux2_klein", models=("FLUX.2 klein 4B", "FLUX.2 klein 9B"), pipelines=("Flux2KleinPipeline",),
    denoiser="transformer",
    components={"text_encoder": (("transformers", "Qwen3ForCausalLM"),),
                "tokenizer": zimage.COMPONENTS["tokenizer"], **PICTURES},
    latent_channels=32, factor=FACTOR, patch=2, step=64, resolution=1024, scaling_factor="1", shift_factor="0",
    predictions=("flow",), predict=predict, chooses_attention=True,
    text=_text(klein_shapes, KLEIN_LAYERS, {}), sampling=KLEIN_SAMPLING, references=KLEIN_REFERENCES, lora=LORA,
    labels=Labels(architecture="flux.2-klein", version="flux2"),
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
