"""Stable Diffusion 3 and 3.5: two CLIPs and T5 in one row of tokens, and the VAE of factor 8 with 16 channels.

Sources: stabilityai/stable-diffusion-3-medium-diffusers (vae/config.json: scaling_factor 1.5305, shift_factor 0.0609);
`StableDiffusion3Pipeline.encode_prompt` in diffusers 0.42: the 77 tokens of both CLIPs side by side, padded with zeros
to T5's width, then T5's tokens; no part has an attention mask, so padding is part of a row. Many leave T5 out: the
pipeline then has zeros in its place, as wide as the transformer says. `SD3Transformer2DModel` takes patches of 2 × 2.

The transformer has a table of positions, which limits the size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser.samplers import BY_STEPS, EULER, MULTISTEP, SINGLESTEP, UNIPC
from prep.models.families import flux, sd15
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
from prep.models.lora.kohya import Kohya, Rule, fused, renamed

if TYPE_CHECKING:
    from torch import Tensor

CLIP_TOKENS = 77  # the length of CLIP's position tables
LAST, JOINT = "text_encoder_3", "joint_attention_dim"


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]: 77 tokens of both CLIPs, then `max_length` of T5; `pooled` [channel] of both CLIPs."""
    width = configs.width(LAST, "d_model") if configs.has(LAST) else configs.width("transformer", JOINT)
    pooled = sum(configs.width(name, "projection_dim") for name in ("text_encoder", "text_encoder_2"))
    return {"hidden": (CLIP_TOKENS + options.max_length, width), "pooled": (pooled,)}


def denoiser_config(configs: Configs) -> Mapping[str, int]:
    """The width of the zeros that stand for T5; nothing if there is T5, which has a width of its own."""
    return {} if configs.has(LAST) else {JOINT: configs.width("transformer", JOINT)}


def longest_side(config: Mapping[str, Any]) -> int | None:
    """Pixels: `pos_embed_max_size` patches of 2 × 2 latent cells; without a table, any size."""
    patches = config.get("pos_embed_max_size", 96)
    return patches * 16 if type(patches) is int else None


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` and one `pooled` per caption; all encoders read the same caption."""
    hidden_BLD, _, pooled_BD, _ = pipeline.encode_prompt(
        prompt=list(captions), prompt_2=None, prompt_3=None, device=device, do_classifier_free_guidance=False,
        clip_skip=options.clip_skip or None, max_sequence_length=options.max_length)
    return [{"hidden": hidden, "pooled": pooled} for hidden, pooled in zip(hidden_BLD, pooled_BD, strict=True)]


def without_prompt(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The pipeline's own negative: the encoding of "", to which a clip_skip does not apply in diffusers either."""
    _, hidden_1LD, _, pooled_1D = pipeline.encode_prompt(
        prompt="", prompt_2=None, prompt_3=None, device=device, do_classifier_free_guidance=True,
        max_sequence_length=options.max_length)
    return {"hidden": hidden_1LD[0], "pooled": pooled_1D[0]}


TEXT = TextEncoding(arrays={"hidden": ("token", "channel"), "pooled": ("channel",)}, layout="full", max_length=256,
                    longest=512, shapes=shapes, encode=encode, without_prompt=without_prompt,
                    denoiser_config=denoiser_config, clip=True)


# ---- the denoiser ----------------------------------------------------------------------------------------------------

TIMESTEPS = 1000  # of the published schedules: the transformer takes sigma times this


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity. Neither the attention nor the text has a mask."""
    answer_BChw: Tensor = transformer(
        hidden_states=noised_BChw, timestep=sigma_B * TIMESTEPS, encoder_hidden_states=conditions.text["hidden"],
        pooled_projections=conditions.text["pooled"], return_dict=False)[0]
    return answer_BChw


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `StableDiffusion3Pipeline.__call__`."""
    return {**sd15.call(transformer, prompted), "pooled_prompt_embeds": prompted.positive["pooled"],
            "negative_pooled_prompt_embeds": prompted.negative["pooled"]}


SAMPLING = SamplePipeline(
    call=call, unpack=sd15.unpack, sampler=EULER,
    # The pipeline gives a shift by size to a scheduler whose config asks for it.
    solvers={**BY_STEPS, MULTISTEP: "any", SINGLESTEP: "any", UNIPC: "any"},
    guidance=7.0)  # the pipeline's default; 3.5 is usually sampled with 3.5 to 4.5


# ---- LoRA ------------------------------------------------------------------------------------------------------------

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
LORA = LoraLayers(presets=PRESETS, kohya=KOHYA)


# ---- the family ------------------------------------------------------------------------------------------------------

PROJECTED_CLIP = (("transformers", "CLIPTextModelWithProjection"),)
COMPONENTS = {
    "text_encoder": PROJECTED_CLIP,
    "text_encoder_2": PROJECTED_CLIP,
    "text_encoder_3": flux.COMPONENTS["text_encoder_2"],
    "tokenizer": sd15.COMPONENTS["tokenizer"],
    "tokenizer_2": sd15.COMPONENTS["tokenizer"],
    "tokenizer_3": flux.T5_TOKENIZERS,
    "transformer": (("diffusers", "SD3Transformer2DModel"),),
    "vae": (("diffusers", "AutoencoderKL"),),
}
FAMILY = Family(
    name="sd3", models=("Stable Diffusion 3.x",), pipelines=("StableDiffusion3Pipeline",),
    denoiser="transformer", buffers=frozenset({"pos_embed.pos_embed"}), components=COMPONENTS,
    optional=frozenset({"text_encoder_3", "tokenizer_3"}),
    latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="1.5305", shift_factor="0.0609",
    predictions=("flow",), text=TEXT, predict=predict, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="stable-diffusion-3"),
    config_widths={"in_channels": ("latent", 1), "joint_attention_dim": ("hidden", 1),
                   "pooled_projection_dim": ("pooled", 1)}, longest_side=longest_side,
)
