"""FLUX.2 dev and klein: a transformer over text tokens and packed latents; dev takes guidance as a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from train.models.families import flux, packing, sd15
from train.models.family import Conditions, Prompted
from train.models.naming import Kohya, Rule, renamed

if TYPE_CHECKING:
    from torch import Tensor

AXES = 4  # of positions: time, row, column, place in the text


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma and guidance by 1000 itself."""
    count, hidden_BLD = len(noised_BChw), given.text["hidden"]
    guided = transformer.config.guidance_embeds
    packed = transformer(
        hidden_states=packing.pack(noised_BChw), timestep=sigma_B,
        guidance=sigma_B.new_full(sigma_B.shape, given.guidance) if guided else None, encoder_hidden_states=hidden_BLD,
        txt_ids=places(hidden_BLD).expand(count, -1, -1),
        img_ids=packing.positions(noised_BChw, AXES).expand(count, -1, -1), return_dict=False)[0]
    return packing.unpack(packed, (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def places(hidden_BLD: Tensor) -> Tensor:
    """[L, 4] float32: the place of each text token on the last axis, zero on the others."""
    length = hidden_BLD.shape[1]
    found = hidden_BLD.new_zeros((length, AXES)).float()
    found[:, -1] = found.new_tensor(range(length))
    return found


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
DEV = replace(flux.DENOISER, predict=predict, call=call_dev, guidance=4.0, presets=PRESETS,  # the pipeline's default
              kohya=KOHYA, further=FURTHER)
KLEIN = replace(DEV, call=call_klein, unpack=sd15.unpack, vae=without_statistics)
