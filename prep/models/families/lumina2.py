"""Lumina Image 2.0: the last layer but one of Gemma 2 for the tokens of a caption behind a system prompt; FLUX.1's VAE.

Sources: `Lumina2Pipeline.encode_prompt` in diffusers 0.42, which puts the system prompt before captions, but not before
negative prompts, and counts it in the 256 tokens of its default. `Lumina2Transformer2DModel` uses only the rows that
the mask keeps; it has positions for no more than 299 of them. The VAE's factors are FLUX.1's; the transformer takes
patches of 2 × 2 latent cells.

The transformer counts time from noise to picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser import padding
from prep.models.denoiser.samplers import BY_SIGMAS, EULER
from prep.models.families import flux, sd15
from prep.models.family import (
    ATTENTION_MASK,
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

# The pipeline's own, given to it again so that rows are what their keys say with any version of diffusers.
SYSTEM_PROMPT = ("You are an assistant designed to generate superior images with the superior degree of image-text "
                 "alignment based on textual prompts or user prompts.")


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of Gemma 2."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "hidden_size"))}


def longest_side(config: Mapping[str, Any]) -> int | None:
    """Pixels: the positions of a side, of patches of 2 × 2 latent cells."""
    positions = config.get("axes_lens", (300, 512, 512))
    sides = [side for side in positions[1:] if type(side) is int] if isinstance(positions, list | tuple) else []
    return min(sides) * 16 if sides else None


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, system prompt included, without padding."""
    hidden_BLD, mask_BL, _, _ = pipeline.encode_prompt(
        list(captions), do_classifier_free_guidance=False, device=device, system_prompt=SYSTEM_PROMPT,
        max_sequence_length=options.max_length)
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


def negative(pipeline: Any, texts: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per negative prompt: no system prompt is before it. Positive prompts are needed to ask for these."""
    _, _, hidden_BLD, mask_BL = pipeline.encode_prompt(
        [""] * len(texts), negative_prompt=list(texts), device=device, max_sequence_length=options.max_length)
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="trimmed", max_length=256, longest=256,
                    shapes=shapes, encode=encode, negative=negative,
                    constants={"system_prompt": SYSTEM_PROMPT})


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The negative of the transformer's answer, which is latent - noise. It takes time from 0 to 1."""
    answer_BChw: Tensor = transformer(
        noised_BChw, timestep=1 - sigma_B, encoder_hidden_states=conditions.text["hidden"],
        encoder_attention_mask=conditions.text[ATTENTION_MASK], return_dict=False)[0]
    return -answer_BChw


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `Lumina2Pipeline.__call__`, which gives guided predictions the norm of unguided ones."""
    return {**padding.embeddings(prompted), "latents": prompted.latent_1Chw, "guidance_scale": prompted.guidance}


SAMPLING = SamplePipeline(call=call, unpack=sd15.unpack, sampler=EULER, solvers=BY_SIGMAS, guidance=4.0)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

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
LORA = LoraLayers(presets=PRESETS, kohya=KOHYA, in_comfyui=False)


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "Gemma2Model"),),
    "tokenizer": (("transformers", "GemmaTokenizer"), ("transformers", "GemmaTokenizerFast")),
    "transformer": (("diffusers", "Lumina2Transformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    # diffusers 0.33 called the pipeline Lumina2Text2ImgPipeline at first.
    name="lumina2", models=("Lumina Image 2.0",), pipelines=("Lumina2Pipeline", "Lumina2Text2ImgPipeline"),
    denoiser="transformer", components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024,
    scaling_factor="0.3611", shift_factor="0.1159", predictions=("flow",), text=TEXT,
    predict=predict, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="lumina-2"),
    config_widths={"in_channels": ("latent", 1), "cap_feat_dim": ("hidden", 1)}, longest_side=longest_side,
)
