"""FLUX.1: a transformer over text tokens and packed latents; the dev model takes guidance as a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from train.models.families import packing
from train.models.family import Conditions, DenoiserFamily, Prompted
from train.models.naming import Kohya, Rule, fused, renamed
from train.models.samplers import BY_SHIFT

if TYPE_CHECKING:
    from torch import Tensor

FACTOR = 8


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma and guidance by 1000 itself."""
    hidden_BLD = given.text["hidden"]
    guided = transformer.config.guidance_embeds
    packed = transformer(
        hidden_states=packing.pack(noised_BChw), timestep=sigma_B,
        guidance=sigma_B.new_full(sigma_B.shape, given.guidance) if guided else None,
        pooled_projections=given.text["pooled"], encoder_hidden_states=hidden_BLD,
        txt_ids=hidden_BLD.new_zeros((hidden_BLD.shape[1], 3)), img_ids=packing.positions(noised_BChw),
        return_dict=False)[0]
    return packing.unpack(packed, (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `FluxPipeline.__call__`: guidance is the model's own number, and no negative is used."""
    return {"prompt_embeds": prompted.positive["hidden"], "pooled_prompt_embeds": prompted.positive["pooled"],
            "latents": packing.pack(prompted.latent_1Chw), "guidance_scale": prompted.guidance}


def unpack(transformer: Any, packed_1NP: Tensor, size: Size) -> Tensor:
    """The pipeline's latents, unpacked."""
    return packing.unpack(packed_1NP, (size[0] // FACTOR, size[1] // FACTOR))


PRESETS: Mapping[str, tuple[str, ...]] = {
    # Image and text projections of the attention, in double and single blocks.
    "attention": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
                   "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out"),
    # Every linear layer of the blocks, with their modulation: what sd-scripts adapts, and its names are for.
    "kohya": ("transformer_blocks.*.attn.*", "transformer_blocks.*.ff*.net.*", "transformer_blocks.*.norm1*.linear",
              "single_transformer_blocks.*"),
}
# The names of the authors' code, as diffusers' loader expects them: it knows layers of blocks only.
_DOUBLE, _SINGLE = r"transformer_blocks\.(\d+)", r"single_transformer_blocks\.(\d+)"
RULES = (
    *fused(_DOUBLE, "attn.to_q attn.to_k attn.to_v", "double_blocks.{}.img_attn.qkv"),
    *fused(_DOUBLE, "attn.add_q_proj attn.add_k_proj attn.add_v_proj", "double_blocks.{}.txt_attn.qkv"),
    *renamed(_DOUBLE, "attn.to_out.0=double_blocks.{}.img_attn.proj attn.to_add_out=double_blocks.{}.txt_attn.proj"),
)
KOHYA = Kohya(module="networks.lora_flux", rules=(
    *RULES,
    *renamed(_DOUBLE, "ff.net.0.proj=double_blocks.{}.img_mlp.0 ff.net.2=double_blocks.{}.img_mlp.2 "
             "ff_context.net.0.proj=double_blocks.{}.txt_mlp.0 ff_context.net.2=double_blocks.{}.txt_mlp.2 "
             "norm1.linear=double_blocks.{}.img_mod.lin norm1_context.linear=double_blocks.{}.txt_mod.lin"),
    *fused(_SINGLE, "attn.to_q attn.to_k attn.to_v proj_mlp", "single_blocks.{}.linear1", (1, 1, 1, 4)),
    *renamed(_SINGLE, "proj_out=single_blocks.{}.linear2 norm.linear=single_blocks.{}.modulation.lin"),
))
# The layers around the blocks: other programs adapt them, diffusers' loader reads none of them in kohya's names.
FURTHER = (
    Rule(layer=r"x_embedder", name="img_in"),
    Rule(layer=r"context_embedder", name="txt_in"),
    *(Rule(layer=rf"{embed}\.{ours}\.linear_{number}", name=f"{theirs}.{place}_layer")
      for embed in ("time_text_embed", "time_guidance_embed")
      for ours, theirs in (("timestep_embedder", "time_in"), ("text_embedder", "vector_in"),
                           ("guidance_embedder", "guidance_in")) for number, place in ((1, "in"), (2, "out"))),
    Rule(layer=r"norm_out\.linear", name="final_layer.adaLN_modulation.1", halved=True),
    Rule(layer=r"proj_out", name="final_layer.linear"),
)
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    solvers=BY_SHIFT,
    guidance=3.5, takes_guidance=True, presets=PRESETS, kohya=KOHYA, further=FURTHER)
