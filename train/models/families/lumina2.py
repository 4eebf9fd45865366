"""Lumina Image 2.0: a transformer that joins text and picture; it counts time from noise to picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prep.models.family import ATTENTION_MASK
from train.models.families import padding, sd15
from train.models.family import Conditions, DenoiserFamily, Prompted
from train.models.naming import Kohya, Rule, fused, renamed
from train.models.samplers import BY_SIGMAS

if TYPE_CHECKING:
    from torch import Tensor


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The negative of the transformer's answer, which is latent - noise. It takes time from 0 to 1."""
    answer_BChw: Tensor = transformer(
        noised_BChw, timestep=1 - sigma_B, encoder_hidden_states=given.text["hidden"],
        encoder_attention_mask=given.text[ATTENTION_MASK], return_dict=False)[0]
    return -answer_BChw


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `Lumina2Pipeline.__call__`, which gives guided predictions the norm of unguided ones."""
    return {**padding.embeddings(prompted), "latents": prompted.latent_1Chw, "guidance_scale": prompted.guidance}


PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # Attention and feed-forward layers of all blocks, the refiners' too; no modulation, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "feed_forward.linear_1", "feed_forward.linear_2",
                   "feed_forward.linear_3"),
    # Every linear layer of the blocks and the last one, with their modulation: what sd-scripts adapts
    # (JointTransformerBlock, FinalLayer).
    "kohya": ("layers.*", "noise_refiner.*", "context_refiner.*", "norm_out.*"),
}
# The names of the authors' code, as sd-scripts (networks/lora_lumina.py) and ComfyUI read them. It fuses the
# attention's projections: 24 heads of queries, 8 of keys and of values.
_BLOCK = r"(layers|noise_refiner|context_refiner)\.(\d+)"
KOHYA = Kohya(module="networks.lora_lumina", imported=False, rules=(
    *fused(_BLOCK, "attn.to_q attn.to_k attn.to_v", "{}.{}.attention.qkv", (3, 1, 1)),
    *renamed(_BLOCK, "attn.to_out.0={}.{}.attention.out feed_forward.linear_1={}.{}.feed_forward.w1 "
             "feed_forward.linear_2={}.{}.feed_forward.w2 feed_forward.linear_3={}.{}.feed_forward.w3 "
             "norm1.linear={}.{}.adaLN_modulation.1"),
    Rule(layer=r"norm_out\.linear_1", name="final_layer.adaLN_modulation.1"),
    Rule(layer=r"norm_out\.linear_2", name="final_layer.linear"),
    Rule(layer=r"x_embedder", name="x_embedder"),
    Rule(layer=r"time_caption_embed\.caption_embedder\.1", name="cap_embedder.1"),
    Rule(layer=r"time_caption_embed\.timestep_embedder\.linear_1", name="t_embedder.mlp.0"),
    Rule(layer=r"time_caption_embed\.timestep_embedder\.linear_2", name="t_embedder.mlp.2"),
))
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=sd15.unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    solvers=BY_SIGMAS,
    guidance=4.0, presets=PRESETS, kohya=KOHYA, in_comfyui=False)
