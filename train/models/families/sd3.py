"""Stable Diffusion 3 and 3.5: a transformer over latents and text, whose table of positions limits the size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.models.families import sd15
from train.models.family import Conditions, DenoiserFamily, Prompted
from train.models.naming import Kohya, Rule, fused, renamed
from train.models.samplers import BY_STEPS, MULTISTEP, SINGLESTEP, UNIPC

if TYPE_CHECKING:
    from torch import Tensor

TIMESTEPS = 1000  # of the published schedules: the transformer takes sigma times this


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity. Neither the attention nor the text has a mask."""
    answer_BChw: Tensor = transformer(
        hidden_states=noised_BChw, timestep=sigma_B * TIMESTEPS, encoder_hidden_states=given.text["hidden"],
        pooled_projections=given.text["pooled"], return_dict=False)[0]
    return answer_BChw


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `StableDiffusion3Pipeline.__call__`."""
    return {**sd15.call(transformer, prompted), "pooled_prompt_embeds": prompted.positive["pooled"],
            "negative_pooled_prompt_embeds": prompted.negative["pooled"]}


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
PRESETS: Mapping[str, tuple[str, ...]] = {
    # Image and text projections of the joint attention, and those of the image's own attention in 3.5 medium.
    "attention": ATTENTION,
    "all-linear": (*ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    # Every linear layer of the blocks, with their modulation: what sd-scripts adapts (SingleDiTBlock).
    "kohya": ("transformer_blocks.*",),
}
# The names of the authors' code, as sd-scripts (networks/lora_sd3.py) and ComfyUI read them.
_BLOCK = r"transformer_blocks\.(\d+)"
KOHYA = Kohya(module="networks.lora_sd3", imported=False, rules=(
    *(rule for attention in ("attn", "attn2") for rule in fused(
        _BLOCK, f"{attention}.to_q {attention}.to_k {attention}.to_v", f"joint_blocks.{{}}.x_block.{attention}.qkv")),
    *fused(_BLOCK, "attn.add_q_proj attn.add_k_proj attn.add_v_proj", "joint_blocks.{}.context_block.attn.qkv"),
    *renamed(_BLOCK, "attn.to_out.0=joint_blocks.{}.x_block.attn.proj "
             "attn2.to_out.0=joint_blocks.{}.x_block.attn2.proj "
             "attn.to_add_out=joint_blocks.{}.context_block.attn.proj ff.net.0.proj=joint_blocks.{}.x_block.mlp.fc1 "
             "ff.net.2=joint_blocks.{}.x_block.mlp.fc2 ff_context.net.0.proj=joint_blocks.{}.context_block.mlp.fc1 "
             "ff_context.net.2=joint_blocks.{}.context_block.mlp.fc2 "
             "norm1.linear=joint_blocks.{}.x_block.adaLN_modulation.1"),
    # Of the last block it is a last normalization of the text.
    Rule(layer=rf"{_BLOCK}\.norm1_context\.linear", name="joint_blocks.{}.context_block.adaLN_modulation.1",
         halved=True),
    Rule(layer=r"norm_out\.linear", name="final_layer.adaLN_modulation.1", halved=True),
    Rule(layer=r"proj_out", name="final_layer.linear"),
    Rule(layer=r"context_embedder", name="context_embedder"),
    Rule(layer=r"pos_embed\.proj", name="x_embedder.proj"),
    *(Rule(layer=rf"time_text_embed\.{ours}\.linear_{number + 1}", name=f"{theirs}.mlp.{2 * number}")
      for ours, theirs in (("timestep_embedder", "t_embedder"), ("text_embedder", "y_embedder")) for number in (0, 1)),
))
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=sd15.unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    # The pipeline gives a shift by size to a scheduler whose config asks for it.
    solvers={**BY_STEPS, MULTISTEP: "any", SINGLESTEP: "any", UNIPC: "any"},
    guidance=7.0,  # the pipeline's default; 3.5 is usually sampled with 3.5 to 4.5
    presets=PRESETS, kohya=KOHYA)
