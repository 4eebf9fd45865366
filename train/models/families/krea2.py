"""Krea 2: a transformer over packed latents and the stacked layers of text tokens, with a mask of the padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from train.models.families import flux, packing, padding
from train.models.family import Conditions, Prompted
from train.models.naming import Kohya, Rule, renamed
from train.models.samplers import BY_SIGMAS

if TYPE_CHECKING:
    from torch import Tensor


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself."""
    layers_BLND, mask_BL = padding.cut(given.text, "layers")
    packed = transformer(
        hidden_states=packing.pack(noised_BChw), encoder_hidden_states=layers_BLND, timestep=sigma_B,
        position_ids=positions(noised_BChw, layers_BLND.shape[1]), encoder_attention_mask=mask_BL,
        return_dict=False)[0]
    return packing.unpack(packed, (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def positions(like_BChw: Tensor, tokens: int) -> Tensor:
    """[tokens + N, 3] float32: zero for each text token, then row and column of each patch on axes 1 and 2."""
    patches = packing.positions(like_BChw)
    found = patches.new_zeros((tokens + len(patches), patches.shape[1]))
    found[tokens:] = patches
    return found


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `Krea2Pipeline.__call__`, which adds its guidance scale times the difference to the positive
    prediction: 0 is off there, and each value means what is one more elsewhere. Both texts have one length: positions
    are made for the positive one.
    """
    given = padding.embeddings(prompted, "layers", mask="prompt_embeds_mask")
    return {**{name: value.bool() if name.endswith("mask") else value for name, value in given.items()},
            "latents": packing.pack(prompted.latent_1Chw), "guidance_scale": prompted.guidance - 1}


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
DENOISER = replace(
    flux.DENOISER, predict=predict, call=call, takes_guidance=False, presets=PRESETS, solvers=BY_SIGMAS,
    kohya=KOHYA, further=(), guidance=5.5)  # the pipeline's default is 4.5, counted from 0
