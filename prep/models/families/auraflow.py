"""AuraFlow: UMT5 for the tokens, and SDXL's VAE.

Sources: `AuraFlowPipeline.encode_prompt` in diffusers 0.42: 256 tokens, those of padding set to zero. The transformer
attends to them all, so padding is part of a row. fal/AuraFlow (vae/config.json: scaling_factor 0.13025; its tokenizer,
that of EleutherAI/pile-t5-xl, is saved as Llama's). The transformer takes patches of 2 × 2 latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser.samplers import BY_STEPS, EULER
from prep.models.families import flux, sd15
from prep.models.family import (
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


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of UMT5."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "d_model"))}


def longest_side(config: Mapping[str, Any]) -> int | None:
    """Pixels: the table has `pos_embed_max_size` patches of 2 × 2 latent cells, in a square."""
    patches = config.get("pos_embed_max_size", 1024)  # as in the class of diffusers
    return isqrt(patches) * 16 if type(patches) is int and patches > 0 else None


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, with zeros for padding."""
    hidden_BLD, _, _, _ = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False, device=device,
                                                 max_sequence_length=options.max_length)
    return [{"hidden": hidden} for hidden in hidden_BLD]


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="full", max_length=256, longest=256, shapes=shapes,
                    encode=encode)


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity. Neither the attention nor the text has a mask."""
    answer_BChw: Tensor = transformer(noised_BChw, encoder_hidden_states=conditions.text["hidden"], timestep=sigma_B,
                                      return_dict=False)[0]
    return answer_BChw


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `AuraFlowPipeline.__call__`, which asks for masks but uses them only to make embeddings."""
    return {**sd15.call(transformer, prompted), "prompt_attention_mask": _mask(prompted.positive),
            "negative_prompt_attention_mask": _mask(prompted.negative)}


def _mask(text: TextArrays) -> Tensor:
    return text["hidden"].new_ones(text["hidden"].shape[:2])


SAMPLING = SamplePipeline(call=call, unpack=sd15.unpack, sampler=EULER, solvers=BY_STEPS,
                          guidance=3.5)  # the pipeline's default


# ---- LoRA ------------------------------------------------------------------------------------------------------------

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
LORA = LoraLayers(presets=PRESETS, kohya=KOHYA)


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "UMT5EncoderModel"),),
    "tokenizer": (*flux.T5_TOKENIZERS, ("transformers", "LlamaTokenizer"), ("transformers", "LlamaTokenizerFast")),
    "transformer": (("diffusers", "AuraFlowTransformer2DModel"),),
    "vae": (("diffusers", "AutoencoderKL"),),
}
FAMILY = Family(
    name="auraflow", models=("AuraFlow",), pipelines=("AuraFlowPipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=4, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.13025",
    shift_factor="0", predictions=("flow",), upcasts_vae=True, text=TEXT, predict=predict, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="auraflow-v1"),
    config_widths={"in_channels": ("latent", 1), "joint_attention_dim": ("hidden", 1)}, longest_side=longest_side,
)
