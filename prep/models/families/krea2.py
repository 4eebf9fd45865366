"""Krea 2 (Raw, Turbo): twelve layers of Qwen3-VL for each token of the caption, and Qwen-Image's VAE.

Sources: `Krea2Pipeline` in diffusers 0.42: `encode_prompt` writes the caption into Qwen-Image's template, cuts off the
rows of its first 34 tokens, and puts the five after the caption behind the padding. Its default is 512 tokens with
these five. model_index.json may name other layers than its default. `Krea2Transformer2DModel` masks padding wherever
tokens attend to each other, and all text tokens have the same position, so rows are stored without padding. It takes
patches of 2 × 2 latent cells.

The transformer takes packed latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.errors import ModelError
from prep.models.configs import Configs, index_file
from prep.models.denoiser import packing, padding
from prep.models.denoiser.samplers import BY_SIGMAS, EULER
from prep.models.families import flux, qwenimage
from prep.models.family import (
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    SamplePipeline,
    Shape,
    TextEncoding,
    TextOptions,
    TextRow,
)
from prep.models.files import FETCH_AGAIN
from prep.models.lora.kohya import Kohya, Rule, renamed
from prep.parse import brief

if TYPE_CHECKING:
    from torch import Tensor

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
    layers = configs.value(SELECTED,)
    if layers is None:
        return LAYERS
    if not isinstance(layers, list) or not 1 <= len(layers) <= MOST_LAYERS or not all(
            type(number) is int and 0 <= number <= MOST_LAYERS for number in layers):
        raise ModelError(f"{index_file(configs.model)} has {SELECTED} {brief(layers)}, expected a list of "
                         f"1 to {MOST_LAYERS} numbers from 0 to {MOST_LAYERS}", hint=FETCH_AGAIN)
    return layers


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `layers` per caption, without the padding between it and the end of the template."""
    layers_BLND, mask_BL = pipeline.encode_prompt(list(captions), device=device, max_sequence_length=options.max_length)
    return [{"layers": layers[mask]} for layers, mask in zip(layers_BLND, mask_BL.bool(), strict=True)]


TEXT = TextEncoding(arrays={"layers": ("token", "layer", "channel")}, layout="trimmed", max_length=512,
                    shortest=SUFFIX_TOKENS + 1, longest=512, shapes=shapes, encode=encode,
                    pipeline_options=(SELECTED,),
                    constants={"layers": ",".join(map(str, LAYERS)), "prefix": PREFIX, "suffix": SUFFIX,
                               "dropped": qwenimage.DROPPED, "suffix_tokens": SUFFIX_TOKENS})


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself."""
    layers_BLND, mask_BL = padding.cut(conditions.text, "layers")
    packed = transformer(
        hidden_states=packing.pack(noised_BChw), encoder_hidden_states=layers_BLND, timestep=sigma_B,
        position_ids=positions(noised_BChw, layers_BLND.shape[1]), encoder_attention_mask=mask_BL,
        return_dict=False)[0]
    return packing.unpack(packed, (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def positions(like_BChw: Tensor, tokens: int) -> Tensor:
    """[tokens + N, 3] float32: zero for each text token, then row and column of each patch on axes 1 and 2."""
    patches = packing.positions(like_BChw)
    ids = patches.new_zeros((tokens + len(patches), patches.shape[1]))
    ids[tokens:] = patches
    return ids


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `Krea2Pipeline.__call__`, which adds its guidance scale times the difference to the positive
    prediction: 0 is off there, and each value means what is one more elsewhere. Both texts have one length: positions
    are made for the positive one.
    """
    embeddings = padding.embeddings(prompted, "layers", mask="prompt_embeds_mask")
    return {**{name: value.bool() if name.endswith("mask") else value for name, value in embeddings.items()},
            "latents": packing.pack(prompted.latent_1Chw), "guidance_scale": prompted.guidance - 1}


SAMPLING = SamplePipeline(call=call, unpack=flux.unpack, sampler=EULER, solvers=BY_SIGMAS,
                          guidance=5.5)  # the pipeline's default is 4.5, counted from 0


# ---- LoRA ------------------------------------------------------------------------------------------------------------

PRESETS: Mapping[str, tuple[str, ...]] = {
    # Of the attention in all blocks, those that fuse text layers, too.
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # With the attention's gates and the feed-forward layers; no modulation, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_gate", "to_out.0", "ff.gate", "ff.up", "ff.down"),
    # Every linear layer of the model, as in kohya's musubi-tuner.
    "kohya": ("*",),
}
# The names of the authors' code, as musubi-tuner (networks/lora_krea2.py) and ComfyUI read them.
_BLOCK = r"transformer_blocks\.(\d+)"
_TEXT_BLOCK = r"text_fusion\.(layerwise_blocks|refiner_blocks)\.(\d+)"
KOHYA = Kohya(module="networks.lora_krea2", imported=False, rules=(
    *(rule for block, name in ((_BLOCK, "blocks.{}"), (_TEXT_BLOCK, "txtfusion.{}.{}")) for rule in renamed(
        block, f"attn.to_q={name}.attn.wq attn.to_k={name}.attn.wk attn.to_v={name}.attn.wv "
        f"attn.to_out.0={name}.attn.wo attn.to_gate={name}.attn.gate "
        f"ff.gate={name}.mlp.gate ff.up={name}.mlp.up ff.down={name}.mlp.down")),
    Rule(layer=r"text_fusion\.projector", name="txtfusion.projector"),
    Rule(layer=r"img_in", name="first"),
    Rule(layer=r"time_embed\.linear_1", name="tmlp.0"),
    Rule(layer=r"time_embed\.linear_2", name="tmlp.2"),
    Rule(layer=r"time_mod_proj", name="tproj.1"),
    Rule(layer=r"txt_in\.linear_1", name="txtmlp.1"),
    Rule(layer=r"txt_in\.linear_2", name="txtmlp.3"),
    Rule(layer=r"final_layer\.linear", name="last.linear"),
))
LORA = LoraLayers(presets=PRESETS, kohya=KOHYA)


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "Qwen3VLModel"), ("transformers", "Qwen3VLForConditionalGeneration")),
    "tokenizer": qwenimage.COMPONENTS["tokenizer"],
    "transformer": (("diffusers", "Krea2Transformer2DModel"),),
    "vae": qwenimage.COMPONENTS["vae"],
}
FAMILY = Family(
    name="krea2", models=("Krea 2",), pipelines=("Krea2Pipeline",), denoiser="transformer", components=COMPONENTS,
    latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="1", shift_factor="0",
    predictions=("flow",), text=TEXT, predict=predict, chooses_attention=True, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="krea-2"),
    config_widths={"in_channels": ("latent", 4), "text_hidden_dim": ("layers", 1)},
)
