"""Chroma: T5 for the tokens, without CLIP, and FLUX.1's VAE.

Sources: `ChromaPipeline.encode_prompt` in diffusers 0.42. Unlike FLUX.1's, its T5 sees the tokenizer's mask, and its
transformer is to attend to a caption's tokens and to one padding token behind them (lodestones/Chroma, "masking T5
padding tokens"): rows are stored with that token and without the others. 512 tokens, padding token included, are the
pipeline's default and its most. The VAE's factors are FLUX.1's; the transformer takes patches of 2 × 2 latent cells.

The transformer must not attend to the padding of shorter texts. The mask is of booleans, as in the authors' code.
`ChromaPipeline` of diffusers 0.42 makes one of floats, which attention adds to its scores, so that it hides nothing
(diffusers issue 13619). Rows without padding need no mask, as in sample pictures.

With gradient checkpointing, `ChromaTransformer2DModel` of 0.42 calls its single blocks without the mask. Then the texts
of each length have a call of their own, without padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser import packing, padding
from prep.models.denoiser.samplers import BY_SIGMAS, EULER
from prep.models.families import flux
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
from prep.models.lora.kohya import Rule

if TYPE_CHECKING:
    from torch import Tensor


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of T5."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "d_model"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption: its tokens, and one of padding unless it fills the row."""
    hidden_BLD, _, mask_BL, *_ = pipeline.encode_prompt(
        list(captions), device=device, do_classifier_free_guidance=False, max_sequence_length=options.max_length)
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="trimmed", padding_masked=True,
                    max_length=512, longest=512, shapes=shapes, encode=encode)


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself."""
    if not transformer.is_gradient_checkpointing:
        return _velocity(transformer, noised_BChw, sigma_B, *padding.cut(conditions.text, "hidden"))

    def answer(numbers: list[int], hidden_GLD: Tensor) -> Tensor:
        return _velocity(transformer, noised_BChw[numbers], sigma_B[numbers], hidden_GLD, None)

    return padding.by_length(conditions.text, "hidden", answer)


def _velocity(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, hidden_BLD: Tensor,
              mask_BL: Tensor | None) -> Tensor:
    packed_BNP = packing.pack(noised_BChw)
    answer = transformer(
        hidden_states=packed_BNP, timestep=sigma_B, encoder_hidden_states=hidden_BLD,
        txt_ids=hidden_BLD.new_zeros((hidden_BLD.shape[1], 3)), img_ids=packing.positions(noised_BChw),
        attention_mask=None if mask_BL is None else _with_picture(mask_BL, packed_BNP.shape[1]), return_dict=False)[0]
    return packing.unpack(answer, (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def _with_picture(mask_BL: Tensor, patches: int) -> Tensor:
    """[B, L + N]: every patch is attended."""
    whole = mask_BL.new_ones((mask_BL.shape[0], mask_BL.shape[1] + patches))
    whole[:, :mask_BL.shape[1]] = mask_BL
    return whole


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `ChromaPipeline.__call__`: rows without padding, and the masks that it asks for, of all ones."""
    arguments: dict[str, Any] = {"latents": packing.pack(prompted.latent_1Chw), "guidance_scale": prompted.guidance}
    for prefix, text in (("", prompted.positive), ("negative_", prompted.negative)):
        hidden_1LD, _ = padding.cut(text, "hidden")
        arguments[f"{prefix}prompt_embeds"] = hidden_1LD
        arguments[f"{prefix}prompt_attention_mask"] = hidden_1LD.new_ones(hidden_1LD.shape[:2]).bool()
    return arguments


SAMPLING = SamplePipeline(call=call, unpack=flux.unpack, sampler=EULER, solvers=BY_SIGMAS, guidance=5.0)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

# The layers are named as FLUX.1's. The small network that makes their modulations is left alone.
FURTHER = (*flux.FURTHER, *(
    Rule(layer=rf"distilled_guidance_layer\.layers\.(\d+)\.linear_{number}",
         name=f"distilled_guidance_layer.layers.{{}}.{side}_layer") for number, side in ((1, "in"), (2, "out"))))
LORA = LoraLayers(presets=flux.PRESETS, kohya=flux.KOHYA, further=FURTHER)


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "T5EncoderModel"),),
    "tokenizer": flux.T5_TOKENIZERS,
    "transformer": (("diffusers", "ChromaTransformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    name="chroma", models=("Chroma",), pipelines=("ChromaPipeline",), denoiser="transformer", components=COMPONENTS,
    latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.3611", shift_factor="0.1159",
    predictions=("flow",), text=TEXT, predict=predict, by_length="recomputing", chooses_attention=True,
    sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="chroma"),
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
