"""AuraFlow: a transformer over latents and text, padding included, whose table of positions limits the size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.models.families import sd15
from train.models.family import Conditions, DenoiserFamily, Prompted, TextArrays
from train.models.naming import Kohya, Rule, renamed
from train.models.samplers import BY_STEPS

if TYPE_CHECKING:
    from torch import Tensor


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity. Neither the attention nor the text has a mask."""
    answer_BChw: Tensor = transformer(noised_BChw, encoder_hidden_states=given.text["hidden"], timestep=sigma_B,
                                      return_dict=False)[0]
    return answer_BChw


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `AuraFlowPipeline.__call__`, which asks for masks but uses them only to make embeddings."""
    return {**sd15.call(transformer, prompted), "prompt_attention_mask": _mask(prompted.positive),
            "negative_prompt_attention_mask": _mask(prompted.negative)}


def _mask(text: TextArrays) -> Tensor:
    return text["hidden"].new_ones(text["hidden"].shape[:2])


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
PRESETS: Mapping[str, tuple[str, ...]] = {
    # Image and text projections of the joint attention, and the attention of the single blocks.
    "attention": ATTENTION,
    "all-linear": (*ATTENTION, *(f"{part}.{name}" for part in ("ff", "ff_context")
                                 for name in ("linear_1", "linear_2", "out_projection"))),
}
# The names of the authors' code, which ComfyUI reads; sd-scripts does not train this family.
_DOUBLE, _SINGLE = r"joint_transformer_blocks\.(\d+)", r"single_transformer_blocks\.(\d+)"
KOHYA = Kohya(imported=False, rules=(
    *renamed(_DOUBLE, "attn.to_q=double_layers.{}.attn.w2q attn.to_k=double_layers.{}.attn.w2k "
             "attn.to_v=double_layers.{}.attn.w2v attn.to_out.0=double_layers.{}.attn.w2o "
             "attn.add_q_proj=double_layers.{}.attn.w1q attn.add_k_proj=double_layers.{}.attn.w1k "
             "attn.add_v_proj=double_layers.{}.attn.w1v attn.to_add_out=double_layers.{}.attn.w1o "
             "ff.linear_1=double_layers.{}.mlpX.c_fc1 ff.linear_2=double_layers.{}.mlpX.c_fc2 "
             "ff.out_projection=double_layers.{}.mlpX.c_proj ff_context.linear_1=double_layers.{}.mlpC.c_fc1 "
             "ff_context.linear_2=double_layers.{}.mlpC.c_fc2 ff_context.out_projection=double_layers.{}.mlpC.c_proj "
             "norm1.linear=double_layers.{}.modX.1 norm1_context.linear=double_layers.{}.modC.1"),
    *renamed(_SINGLE, "attn.to_q=single_layers.{}.attn.w1q attn.to_k=single_layers.{}.attn.w1k "
             "attn.to_v=single_layers.{}.attn.w1v attn.to_out.0=single_layers.{}.attn.w1o "
             "ff.linear_1=single_layers.{}.mlp.c_fc1 ff.linear_2=single_layers.{}.mlp.c_fc2 "
             "ff.out_projection=single_layers.{}.mlp.c_proj norm1.linear=single_layers.{}.modCX.1"),
    Rule(layer=r"norm_out\.linear", name="modF.1", halved=True),
    Rule(layer=r"proj_out", name="final_linear"),
    Rule(layer=r"context_embedder", name="cond_seq_linear"),
    Rule(layer=r"pos_embed\.proj", name="init_x_linear"),
    Rule(layer=r"time_step_proj\.linear_1", name="t_embedder.mlp.0"),
    Rule(layer=r"time_step_proj\.linear_2", name="t_embedder.mlp.2"),
))
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=sd15.unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    solvers=BY_STEPS,
    guidance=3.5,  # the pipeline's default
    presets=PRESETS, kohya=KOHYA)
