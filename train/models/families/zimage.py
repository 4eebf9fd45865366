"""Z-Image: a transformer over lists of pictures and of text rows; it counts time from noise to picture.

It fills texts, and pictures whose number of patches is no multiple of 32, with learned tokens that are attended: text
rows must come without padding, and a picture's size is part of what the model sees, in training as in the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.models.families import padding, sd15
from train.models.family import Conditions, DenoiserFamily, Prompted
from train.models.naming import Kohya, Rule, fused, renamed

if TYPE_CHECKING:
    from torch import Tensor


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The negative of the transformer's answer, which is latent - noise. A picture has one frame: [C, 1, h, w]."""
    answers = transformer(list(noised_BChw.unsqueeze(2)), 1 - sigma_B, padding.rows(given.text, "hidden"),
                          return_dict=False)[0]
    return -_stacked(answers).squeeze(2)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """[B, …] of B tensors of one shape; by assignment, because this package imports no torch."""
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
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=sd15.unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    guidance=5.0, presets=PRESETS, kohya=KOHYA, further=FURTHER)
