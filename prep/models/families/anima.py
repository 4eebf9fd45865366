"""Anima: Qwen3 0.6B for what the words mean, T5's tokens for the words themselves, and Qwen-Image's VAE.

Sources: the blocks of `AnimaModularPipeline` in diffusers 0.42. `AnimaTextEncoderStep` gives the caption, without a
template, to Qwen3 and to T5's tokenizer; there is no T5. `AnimaTextConditioner`, of 135 million parameters, makes the
denoiser's text of both: for each of T5's tokens it looks at Qwen3's last layer, with a mask. It fills what it returns
up to 512 tokens with zeros, which the denoiser attends to like all others. Of more tokens, as the pipeline takes if it
is asked to, the zeros of a text would depend on the longest one of its batch, so 512 is the most.

Rows have what the conditioner is given. So they stay where the conditioner is another, and it is loaded to train and to
sample, but is never trained. The denoiser is `CosmosTransformer3DModel`, Cosmos-Predict2's, for a video of one frame.

B samples, L tokens of Qwen3, K tokens of T5, D channels, C latent channels, h w latent cells.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser import padding
from prep.models.denoiser.samplers import BY_SIGMAS, EULER
from prep.models.families import flux, flux3, qwenimage
from prep.models.family import (
    Conditioner,
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    SamplePipeline,
    Shape,
    TextArrays,
    TextEncoding,
    TextOptions,
    TextRow,
)
from prep.models.lora.kohya import Kohya, Rule, renamed

if TYPE_CHECKING:
    from torch import Tensor

BASE = 256  # of the digits that a token's number is stored as: every dtype of a cache has them exactly
DIGITS = 2  # T5's vocabulary has 32,128 tokens
NONE = -1  # both digits where there is no token


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of Qwen3, and `t5_ids` [token of T5, digit], which has one length for all captions."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "hidden_size")),
            "t5_ids": (options.max_length, DIGITS)}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without padding, and the numbers of T5's tokens.

    Of an empty caption Qwen3 has no token, and the pipeline masks a row of zeros. Attention to that row alone is zero,
    too, so it is stored like the row of a token.
    """
    found = pipeline.blocks.sub_blocks["text_encoder"].encode_prompt(
        pipeline, list(captions), prepare_unconditional_embeds=False, max_sequence_length=options.max_length,
        device=device)
    rows = zip(found["qwen_prompt_embeds"], found["qwen_attention_mask"].bool(), found["t5_input_ids"],
               found["t5_attention_mask"].bool(), strict=True)
    return [{"hidden": hidden_LD[mask_L] if mask_L.any() else hidden_LD[:1],
             "t5_ids": digits_of(ids_K[mask_K], options.max_length)} for hidden_LD, mask_L, ids_K, mask_K in rows]


def digits_of(ids_K: Tensor, length: int) -> Tensor:
    """[length, 2] of token numbers: the high digit and the low one."""
    digits = ids_K.new_full((length, DIGITS), NONE)
    digits[:len(ids_K), 0], digits[:len(ids_K), 1] = ids_K // BASE, ids_K % BASE
    return digits


def ids_of(text: TextArrays) -> tuple[Tensor, Tensor]:
    """T5's token numbers, [B, K] int64 (0 where there is none), and their mask, [B, K] bool."""
    digits_BK2 = text["t5_ids"].long()
    mask_BK = digits_BK2[..., 0] != NONE
    return (digits_BK2[..., 0] * BASE + digits_BK2[..., 1]) * mask_BK, mask_BK


TEXT = TextEncoding(arrays={"hidden": ("token", "channel"), "t5_ids": ("t5_token", "digit")}, layout="trimmed",
                    max_length=512, longest=512, shapes=shapes, encode=encode)


# ---- the denoiser ----------------------------------------------------------------------------------------------------

FACTOR, PATCH = 8, 2


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity. It takes sigma as it is, and a mask of pixels that are padding: here none is."""
    provide_resize(transformer)
    height, width = (side * FACTOR for side in noised_BChw.shape[-2:])
    answer: Tensor = transformer(
        hidden_states=noised_BChw[:, :, None], timestep=sigma_B,
        encoder_hidden_states=conditioned(conditions.conditioner, conditions.text).to(noised_BChw.dtype),
        padding_mask=noised_BChw.new_zeros(1, 1, height, width), return_dict=False)[0]
    return answer[:, :, 0]


def conditioned(conditioner: Any, text: TextArrays) -> Tensor:
    """[B, 512, D]: the text that the denoiser attends to."""
    hidden_BLD, mask_BL = padding.cut(text, "hidden")
    ids_BK, mask_BK = ids_of(text)
    found: Tensor = conditioner(source_hidden_states=hidden_BLD.to(conditioner.dtype), target_input_ids=ids_BK,
                                target_attention_mask=mask_BK, source_attention_mask=mask_BL)
    return found


def provide_resize(transformer: Any) -> None:
    """Gives the module of the transformer's class what it takes of torchvision, unless that is installed: the function
    that brings the mask of padding, which has only zeros, to the size of a latent."""
    kind = next(kind for kind in type(transformer).__mro__ if kind.__name__ == "CosmosTransformer3DModel")
    module: Any = sys.modules[kind.__module__]
    if not hasattr(module, "transforms"):
        module.transforms = SimpleNamespace(functional=SimpleNamespace(resize=_resized),
                                            InterpolationMode=SimpleNamespace(NEAREST=None))


def _resized(mask_11HW: Tensor, size: Sequence[int], interpolation: None) -> Tensor:
    """A mask of zeros of another size."""
    return mask_11HW.new_zeros((*mask_11HW.shape[:2], *size))


def longest_side(config: Mapping[str, Any]) -> int | None:
    """Pixels of the longest side that has positions: a table for all axes is as long as the longest of them in patches,
    and learned positions, where there are any, are a table for each side."""
    most, patch = config.get("max_size", [128, 240, 240]), config.get("patch_size", [1, PATCH, PATCH])
    if not all(isinstance(value, list) and len(value) == 3 and all(type(side) is int and side > 0 for side in value)
               for value in (most, patch)):
        return None
    patches = [side // size for side, size in zip(most, patch, strict=True)]
    learned = config.get("extra_pos_embed_type", "learnable") is not None
    longest: int = min(patches[1:]) if learned else max(patches)
    return longest * PATCH * FACTOR


def prepare(pipeline: Any, prompted: Prompted) -> None:
    """Sets the guidance scale."""
    provide_resize(pipeline.transformer)
    flux3.prepare(pipeline, prompted)


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `AnimaModularPipeline.__call__`: what the conditioner is given of both texts."""
    given: dict[str, Tensor] = {"latents": prompted.latent_1Chw[:, :, None]}
    for prefix, text in (("", prompted.positive), ("negative_", prompted.negative)):
        hidden_1LD, _ = padding.cut(text, "hidden")
        ids_1K, mask_1K = ids_of(text)
        given |= {f"{prefix}qwen_prompt_embeds": hidden_1LD, f"{prefix}t5_input_ids": ids_1K,
                  f"{prefix}qwen_attention_mask": mask_1K.new_ones(hidden_1LD.shape[:2]),
                  f"{prefix}t5_attention_mask": mask_1K}
    return given


def unpack(model: Any, latents_1C1hw: Tensor, size: tuple[int, int]) -> Tensor:
    """Latents [1, C, h, w] of those of a video of one frame."""
    return latents_1C1hw[:, :, 0]


SAMPLING = SamplePipeline(call=call, unpack=unpack, sampler=EULER, solvers=BY_SIGMAS, prepare=prepare,
                          guidance=4.0)  # of `AnimaLoopDenoiser`


# ---- LoRA ------------------------------------------------------------------------------------------------------------

PRESETS: Mapping[str, tuple[str, ...]] = {
    # Of the picture with itself, and with the text.
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # With the feed-forward layers; no modulation, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
    # The same: what is left of sd-scripts' layers where `exclude_patterns` is its own (networks/lora_anima.py).
    "kohya": ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
}
# The names of the authors' code, as `convert_cosmos_transformer_checkpoint_to_diffusers` reads them, and as sd-scripts
# (networks/lora_anima.py) and ComfyUI have them.
_BLOCK = r"transformer_blocks\.(\d+)"
KOHYA = Kohya(module="networks.lora_anima", usual=True, imported=False, rules=(
    *(rule for number, name in ((1, "self_attn"), (2, "cross_attn")) for rule in renamed(
        _BLOCK, f"attn{number}.to_q=blocks.{{}}.{name}.q_proj attn{number}.to_k=blocks.{{}}.{name}.k_proj "
        f"attn{number}.to_v=blocks.{{}}.{name}.v_proj attn{number}.to_out.0=blocks.{{}}.{name}.output_proj")),
    *renamed(_BLOCK, "ff.net.0.proj=blocks.{}.mlp.layer1 ff.net.2=blocks.{}.mlp.layer2"),
    *(Rule(layer=rf"{_BLOCK}\.norm{number}\.linear_([12])", name=f"blocks.{{}}.adaln_modulation_{name}.{{}}")
      for number, name in ((1, "self_attn"), (2, "cross_attn"), (3, "mlp"))),
    Rule(layer=r"patch_embed\.proj", name="x_embedder.proj.1"),
    Rule(layer=r"time_embed\.t_embedder\.(linear_[12])", name="t_embedder.1.{}"),
    Rule(layer=r"norm_out\.linear_([12])", name="final_layer.adaln_modulation.{}"),
    Rule(layer=r"proj_out", name="final_layer.linear"),
))
LORA = LoraLayers(presets=PRESETS, kohya=KOHYA, in_comfyui=False)


# ---- the family ------------------------------------------------------------------------------------------------------

FAMILY = Family(
    name="anima", models=("Anima",), pipelines=("AnimaModularPipeline",), denoiser="transformer",
    components={
        "text_encoder": (("transformers", "Qwen3Model"),),
        "tokenizer": qwenimage.COMPONENTS["tokenizer"],
        "t5_tokenizer": flux.T5_TOKENIZERS,
        "text_conditioner": (("diffusers", "AnimaTextConditioner"),),
        "transformer": (("diffusers", "CosmosTransformer3DModel"),),
        "vae": qwenimage.COMPONENTS["vae"],
    },
    conditioner=Conditioner(component="text_conditioner", config_widths={"source_dim": ("hidden", 1)},
                            joint=("target_dim", "text_embed_dim")),
    latent_channels=16, factor=FACTOR, patch=PATCH, step=64, resolution=1024, scaling_factor="1", shift_factor="0",
    predictions=("flow",), text=TEXT, predict=predict, sampling=SAMPLING, lora=LORA, longest_side=longest_side,
    labels=Labels(architecture="anima-preview"),
    config_widths={"in_channels": ("latent", 1)},
)
