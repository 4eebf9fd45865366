"""FLUX.3 Image klein-base: eight layers of Qwen3-VL side by side, and FLUX.2's VAE. It takes up to ten references.

Sources: the blocks of `Flux3ModularPipeline` in diffusers 0.42. `Flux3TextEncoderStep` writes the caption into the
processor's chat template, and pads it on the right to a multiple of 80 tokens. `Flux3Transformer2DModel` gets no mask,
so the padding of that window is part of a row, and each row has the length of its own window. Texts of different
windows cannot share a call. The text encoder masks the padding, and is given its positions: those of transformers 4.57.
The prompt upsampler of the published pipeline writes longer prompts; captions are encoded as they are.

Text and references have no noise, and positions of their own on the last axis: 0, 1, 2 … and -1, -2 …; those of rows
and columns are halved. Text rows are the same with and without references.

FLUX.3 klein, which was distilled to few steps, is also told where each step ends: its authors advise to train
klein-base. LoRA files of klein-base fit it.

B samples, L text tokens, N tokens of pictures, D channels, h w latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser import packing, padding
from prep.models.denoiser.samplers import BY_SIGMAS, EULER
from prep.models.families import flux2
from prep.models.family import (
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    References,
    SamplePipeline,
    Shape,
    TextEncoding,
    TextOptions,
    TextRow,
)
from prep.models.lora.kohya import Rule, renamed

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = (4, 8, 12, 16, 20, 24, 28, 32)  # hidden states that are read; the first is that of the embeddings
WINDOW = 80  # tokens; rows have a multiple of it
PADDING_POSITION = 1
MOST = 10  # references, by the prompt upsampler's `MAX_REFERENCES`


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]: the layers of a token are side by side."""
    width = configs.width("text_encoder", "text_config", "hidden_size")
    return {"hidden": (options.max_length, len(LAYERS) * width)}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, with the padding of its window: `_get_qwen3_vl_prompt_embeds`, which takes one caption.

    Captions of the same window share a call here. What the encoder's head would say is not computed.
    """
    tokenizer = getattr(pipeline.tokenizer, "tokenizer", pipeline.tokenizer)  # of a processor
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": caption}], tokenize=False,
                                           add_generation_prompt=True) for caption in captions]
    tokens = tokenizer(texts, truncation=True, max_length=options.max_length)["input_ids"]
    windows: dict[int, list[int]] = {}
    for number, ids in enumerate(tokens):
        windows.setdefault(min(-(-len(ids) // WINDOW) * WINDOW, options.max_length), []).append(number)
    rows: dict[int, TextRow] = {}
    for window, numbers in windows.items():
        given = tokenizer.pad({"input_ids": [tokens[number] for number in numbers]}, padding="max_length",
                              max_length=window, padding_side="right", return_tensors="pt")
        hidden_BLD = _hidden(pipeline.text_encoder, given["input_ids"].to(device), given["attention_mask"].to(device))
        rows |= {number: {"hidden": hidden_LD} for number, hidden_LD in zip(numbers, hidden_BLD, strict=True)}
    return [rows[number] for number in range(len(captions))]


def _hidden(encoder: Any, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """[B, L, D] of the layers."""
    places_BL = (mask_BL.cumsum(1) - 1).masked_fill(mask_BL == 0, PADDING_POSITION)
    states = encoder(input_ids=ids_BL, attention_mask=mask_BL, position_ids=places_BL, output_hidden_states=True,
                     use_cache=False, logits_to_keep=1).hidden_states
    width = states[0].shape[-1]
    hidden_BLD: Tensor = states[0].new_empty((*ids_BL.shape, len(LAYERS) * width))
    for place, layer in enumerate(LAYERS):
        hidden_BLD[..., place * width:(place + 1) * width] = states[layer]
    return hidden_BLD


# ---- the denoiser ----------------------------------------------------------------------------------------------------

SCALE = 0.5  # of rows and columns in positions: `image_rope_scale`


def positions(latent_BChw: Tensor, place: int = 0) -> Tensor:
    """[N, 4] float32: row and column of each patch, halved, and the picture's place on the last axis."""
    found = packing.positions(latent_BChw, flux2.AXES) * SCALE
    found[:, -1] = place
    return found


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself."""
    patches_BNP, ids = packing.pack(noised_BChw), positions(noised_BChw)

    def answer(numbers: list[int], hidden_GLD: Tensor) -> Tensor:
        packed: Tensor = transformer(
            **append({"hidden_states": patches_BNP[numbers], "img_ids": ids},
                     [reference[numbers] for reference in conditions.references]),
            encoder_hidden_states=hidden_GLD, txt_ids=flux2.places(hidden_GLD), timestep=sigma_B[numbers],
            return_dict=False)[0]
        return packing.unpack(packed, (noised_BChw.shape[-1], noised_BChw.shape[-2]))

    return padding.by_length(conditions.text, "hidden", answer)


def append(given: Mapping[str, Any], references: Sequence[Tensor]) -> Mapping[str, Any]:
    """The transformer's arguments with references, which have a projection and blocks of their own."""
    if not references:
        return given
    tokens = [packing.pack(latent) for latent in references]
    ids = [positions(latent, -number) for number, latent in enumerate(references, 1)]
    return {**given, "image_cond_hidden_states": packing.joined(tokens[0], tokens[1:]),
            "image_cond_ids": packing.joined(ids[0], ids[1:])}


def prepare(pipeline: Any, prompted: Prompted) -> None:
    """Sets the guidance scale, which is a component's; 1 is off."""
    pipeline.guider = type(pipeline.guider)(guidance_scale=prompted.guidance)


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `Flux3ModularPipeline.__call__`."""
    return {"prompt_embeds": padding.cut(prompted.positive, "hidden")[0],
            "negative_prompt_embeds": padding.cut(prompted.negative, "hidden")[0],
            "latents": flux2.patches(prompted.latent_1Chw)}


def unpack(model: Any, patches_1Phw: Tensor, size: tuple[int, int]) -> Tensor:
    """Latents [1, C, h, w] of those of the pipeline, whose channels are the numbers of a patch."""
    return packing.unpack(patches_1Phw.flatten(2).transpose(1, 2),
                          (size[0] // flux2.FACTOR, size[1] // flux2.FACTOR))


SAMPLING = SamplePipeline(call=call, unpack=unpack, sampler=EULER, solvers=BY_SIGMAS, prepare=prepare,
                          guidance=3.5)  # of `Flux3LoopDenoiser`


# ---- LoRA ------------------------------------------------------------------------------------------------------------

PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # With the feed-forward layers; no modulation, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "ff.linear_in", "ff.linear_out"),
}
# The names of the authors' code: `convert_flux3_transformer_checkpoint_to_diffusers`.
FURTHER = (
    *(rule for block, name in (
        (r"mode_blocks\.(\w+)\.(\d+)", "content_mode_blocks.{}.{}"),
        (r"txt_mode_blocks\.(\d+)", "txt_mode_blocks.{}"), (r"single_transformer_blocks\.(\d+)", "single_blocks.{}"))
      for rule in renamed(block, f"attn.to_q={name}.q_proj attn.to_k={name}.k_proj attn.to_v={name}.v_proj "
                          f"attn.to_out.0={name}.attn_out ff.linear_in={name}.mlp_in ff.linear_out={name}.mlp_out")),
    Rule(layer=r"x_embedders\.(\w+)", name="emb_in.{}"),
    Rule(layer=r"context_embedder", name="txt_in"),
    Rule(layer=r"timestep_embedder\.linear_1", name="time_in.in_layer"),
    Rule(layer=r"timestep_embedder\.linear_2", name="time_in.out_layer"),
    Rule(layer=r"(early_stream_modulations|single_stream_modulations)\.(\w+)\.linear", name="{}.{}.lin"),
    Rule(layer=r"norm_out\.linear", name="final_layer.image.adaLN_modulation.1", halved=True),
    Rule(layer=r"proj_out", name="final_layer.image.linear"),
)
LORA = LoraLayers(presets=PRESETS, kohya=None, further=FURTHER, in_comfyui=False)


# ---- the family ------------------------------------------------------------------------------------------------------

FAMILY = Family(
    name="flux3", models=("FLUX.3 klein-base",), pipelines=("Flux3ModularPipeline",),
    distilled=("Flux3DistilledModularPipeline",), denoiser="transformer",
    components={
        "text_encoder": (("transformers", "Qwen3VLForConditionalGeneration"),),
        "tokenizer": (("transformers", "Qwen3VLProcessor"), ("transformers", "AutoProcessor")),
        "transformer": (("diffusers", "Flux3Transformer2DModel"),),
        "vae": flux2.PICTURES["vae"],
    },
    latent_channels=32, factor=flux2.FACTOR, patch=2, step=64, resolution=1024, scaling_factor="1", shift_factor="0",
    predictions=("flow",), schedule={"_class_name": EULER, "shift": 6.93}, predict=predict, by_length="always",
    chooses_attention=True, sampling=SAMPLING, lora=LORA,
    references=References(most=MOST, resolution=1024, place=flux2.fitted, append=append, own_blocks=True),
    text=TextEncoding(arrays={"hidden": ("token", "channel")}, layout="trimmed", max_length=1040,
                      longest=4080,  # the prompt upsampler writes at most 3584
                      shapes=shapes, encode=encode,
                      constants={"layers": ",".join(map(str, LAYERS)), "window": WINDOW,
                                 "padding_position": PADDING_POSITION}),
    labels=Labels(architecture="flux.3-klein"),
    config_widths={"in_channels": ("latent", 4), "cond_in_channels": ("latent", 4),
                   "joint_attention_dim": ("hidden", 1)},
)
