"""FLUX.1 (dev, schnell): T5 for the tokens, CLIP for one pooled vector, and the VAE of factor 8 with 16 channels.

Sources: black-forest-labs/FLUX.1-dev (vae/config.json: scaling_factor 0.3611, shift_factor 0.1159); the transformer
takes patches of 2 × 2 latent cells; `FluxPipeline.encode_prompt` in diffusers 0.42, whose T5 sees no attention mask, so
padding is part of a row. dev has learned from 512 tokens and schnell from 256: set model.max_length for schnell.

The transformer takes text tokens and packed latents; that of dev also takes guidance as a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from prep.models.configs import Configs
from prep.models.denoiser import packing
from prep.models.denoiser.samplers import BY_SHIFT, EULER
from prep.models.families import sd15
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

T5_TOKENIZERS = (("transformers", "T5TokenizerFast"), ("transformers", "T5Tokenizer"))


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of T5, and `pooled` [channel] of CLIP."""
    return {"hidden": (options.max_length, configs.width("text_encoder_2", "d_model")),
            "pooled": (configs.width("text_encoder", "hidden_size"),)}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` and one `pooled` per caption. The positions of text tokens are all zero, so they are not stored."""
    hidden_BLD, pooled_BD, _ = pipeline.encode_prompt(prompt=list(captions), prompt_2=None, device=device,
                                                      max_sequence_length=options.max_length)
    return [{"hidden": hidden, "pooled": pooled} for hidden, pooled in zip(hidden_BLD, pooled_BD, strict=True)]


TEXT = TextEncoding(arrays={"hidden": ("token", "channel"), "pooled": ("channel",)}, layout="full", max_length=512,
                    longest=512, shapes=shapes, encode=encode)


# ---- the denoiser ----------------------------------------------------------------------------------------------------

FACTOR = 8
GUIDANCE = 3.5  # in training, unless the setting guidance_embedding says otherwise: that of diffusers' example


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma and guidance by 1000 itself."""
    given = {"hidden_states": packing.pack(noised_BChw), "img_ids": packing.positions(noised_BChw)}
    return answer(transformer, append(given, conditions.references), noised_BChw, sigma_B, conditions)


def answer(transformer: Any, given: Mapping[str, Any], noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions
           ) -> Tensor:
    """The transformer's velocity, unpacked; `given` are its tokens, of which those of the noise come first."""
    hidden_BLD, (height, width) = conditions.text["hidden"], noised_BChw.shape[-2:]
    packed = transformer(
        **given, timestep=sigma_B, guidance=guidance_of(transformer, sigma_B, conditions),
        pooled_projections=conditions.text["pooled"], encoder_hidden_states=hidden_BLD,
        txt_ids=hidden_BLD.new_zeros((hidden_BLD.shape[1], 3)), return_dict=False)[0]
    return packing.unpack(packed[:, :height * width // packing.PATCH**2], (width, height))


def append(given: Mapping[str, Any], references: Sequence[Tensor]) -> Mapping[str, Any]:
    """The arguments of the transformer with references, which Kontext's has: see `flux_kontext`."""
    return packing.with_references(given, references, apart=1)


def guidance_of(transformer: Any, sigma_B: Tensor, conditions: Conditions) -> Tensor | None:
    """[B]: the guidance number that a transformer like dev's takes; `None`: it takes none, like schnell's."""
    if not transformer.config.guidance_embeds:
        return None
    number = conditions.guidance_embedding
    return sigma_B.new_full(sigma_B.shape, GUIDANCE if number is None else number)


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `FluxPipeline.__call__`: guidance is the model's own number, and no negative is used."""
    return {"prompt_embeds": prompted.positive["hidden"], "pooled_prompt_embeds": prompted.positive["pooled"],
            "latents": packing.pack(prompted.latent_1Chw), "guidance_scale": prompted.guidance}


def unpack(transformer: Any, packed_1NP: Tensor, size: Size) -> Tensor:
    """The pipeline's latents, unpacked."""
    return packing.unpack(packed_1NP, (size[0] // FACTOR, size[1] // FACTOR))


SAMPLING = SamplePipeline(call=call, unpack=unpack, sampler=EULER, solvers=BY_SHIFT, guidance=3.5)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

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
LORA = LoraLayers(presets=PRESETS, kohya=KOHYA, further=FURTHER)


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": sd15.COMPONENTS["text_encoder"],
    "text_encoder_2": (("transformers", "T5EncoderModel"),),
    "tokenizer": sd15.COMPONENTS["tokenizer"],
    "tokenizer_2": T5_TOKENIZERS,
    "transformer": (("diffusers", "FluxTransformer2DModel"),),
    "vae": (("diffusers", "AutoencoderKL"),),
}


def labels(prediction: str, configs: Configs) -> Labels:
    """dev takes guidance as a number, schnell does not."""
    guided = configs("transformer").get("guidance_embeds")
    return Labels(architecture="flux-1-dev" if guided else "flux-1-schnell", version="flux1")


FAMILY = Family(
    name="flux", models=("FLUX.1 dev", "FLUX.1 schnell"), pipelines=("FluxPipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.3611",
    shift_factor="0.1159", predictions=("flow",), text=TEXT,
    predict=predict, chooses_attention=True, takes_guidance=True, sampling=SAMPLING, lora=LORA,
    labels=labels,
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1),
                   "pooled_projection_dim": ("pooled", 1)},
)
