"""Z-Image and Z-Image-Turbo: the last layer but one of Qwen3 for the tokens of the caption alone, and FLUX.1's VAE.

Sources: `ZImagePipeline.encode_prompt` in diffusers 0.42, which writes the caption into the tokenizer's chat template
(part of the text fingerprint) and returns a list of rows without padding; `ZImageTransformer2DModel` there, which pads
each row with tokens of its own, so a stored padding row would be text to it. 512 tokens, template included, are the
pipeline's default. The VAE's factors are FLUX.1's; the transformer takes patches of 2 × 2 latent cells.

The transformer takes lists of pictures and of text rows, and counts time from noise to picture. It fills texts, and
pictures whose number of patches is no multiple of 32, with learned tokens that are attended: text rows must come
without padding, and a picture's size is part of what the model sees, in training as in the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser import padding
from prep.models.denoiser.samplers import EULER
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


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without padding."""
    rows, _ = pipeline.encode_prompt(list(captions), device=device, do_classifier_free_guidance=False,
                                     max_sequence_length=options.max_length)
    return [{"hidden": hidden_LD} for hidden_LD in rows]


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="trimmed", padding_masked=True,
                    max_length=512, longest=512, shapes=shapes, encode=encode)


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The negative of the transformer's answer, which is latent - noise. A picture has one frame: [C, 1, h, w]."""
    answers = transformer(list(noised_BChw.unsqueeze(2)), 1 - sigma_B, padding.rows(conditions.text, "hidden"),
                          return_dict=False)[0]
    return -_stacked(answers).squeeze(2)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """[B, …] of B tensors of one shape; by assignment, because this module imports no torch."""
    whole = parts[0].new_empty((len(parts), *parts[0].shape))
    for number, part in enumerate(parts):
        whole[number] = part
    return whole


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `ZImagePipeline.__call__`, which adds its guidance scale times the difference to the positive
    prediction: 0 is off there, and each value means what is one more elsewhere.
    """
    return {"prompt_embeds": padding.rows(prompted.positive, "hidden"),
            "negative_prompt_embeds": padding.rows(prompted.negative, "hidden"),
            "latents": prompted.latent_1Chw, "guidance_scale": prompted.guidance - 1}


SAMPLING = SamplePipeline(call=call, unpack=sd15.unpack, sampler=EULER, guidance=5.0)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # Attention and feed-forward layers of all blocks, the refiners' too; no modulation, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
}
# The names of the authors' code, which fuses the attention's projections.
_BLOCK = r"(layers|noise_refiner|context_refiner)\.(\d+)"
KOHYA = Kohya(module="networks.lora_zimage", rules=(
    *fused(_BLOCK, "attention.to_q attention.to_k attention.to_v", "{}.{}.attention.qkv"),
    *renamed(_BLOCK, "attention.to_out.0={}.{}.attention.out"),
    Rule(layer=rf"{_BLOCK}\.(feed_forward\.w\d|adaLN_modulation\.0)", name=""),
))
FURTHER = (  # the layers around the blocks, of patches of 2 x 2; the rest are named as diffusers does
    Rule(layer=r"all_x_embedder\.2-1", name="x_embedder"),
    Rule(layer=r"all_final_layer\.2-1\.(.+)", name="final_layer.{}"),
)
LORA = LoraLayers(presets=PRESETS, kohya=KOHYA, further=FURTHER)


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "Qwen3Model"), ("transformers", "Qwen3ForCausalLM")),
    "tokenizer": (("transformers", "Qwen2Tokenizer"), ("transformers", "Qwen2TokenizerFast")),
    "transformer": (("diffusers", "ZImageTransformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    name="zimage", models=("Z-Image", "Z-Image-Turbo"), pipelines=("ZImagePipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.3611",
    shift_factor="0.1159", predictions=("flow",), text=TEXT, predict=predict, chooses_attention=True,
    sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="z-image"),
    config_widths={"in_channels": ("latent", 1), "cap_feat_dim": ("hidden", 1)},
)
