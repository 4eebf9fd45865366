"""ERNIE-Image: a transformer over patches of latents and rows of text, whose padding it masks by their lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from train.models.families import flux2, packing, padding
from train.models.family import Conditions, DenoiserFamily, Prompted
from train.models.naming import Kohya

if TYPE_CHECKING:
    from torch import Tensor

TIMESTEPS = 1000  # of the published schedule: the transformer takes sigma times this


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity, for each latent cell."""
    hidden_BLD, _ = padding.cut(given.text, "hidden")
    answer = transformer(
        hidden_states=flux2.patches(noised_BChw), timestep=sigma_B * TIMESTEPS, text_bth=hidden_BLD,
        text_lens=sigma_B.new_tensor(padding.lengths(given.text)).long(), return_dict=False)[0]
    return cells(answer)


def cells(patches_BPyx: Tensor) -> Tensor:
    """[B, C, h, w] of patches, the inverse of `flux2.patches`."""
    rows, columns = patches_BPyx.shape[-2:]
    packed = patches_BPyx.flatten(2).transpose(1, 2)
    return packing.unpack(packed, (columns * packing.PATCH, rows * packing.PATCH))


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `ErnieImagePipeline.__call__`."""
    return {"prompt_embeds": padding.rows(prompted.positive, "hidden"),
            "negative_prompt_embeds": padding.rows(prompted.negative, "hidden"),
            "latents": flux2.patches(prompted.latent_1Chw), "guidance_scale": prompted.guidance}


def unpack(transformer: Any, patches_1Pyx: Tensor, size: Size) -> Tensor:
    """The pipeline's latents, by cell."""
    return cells(patches_1Pyx)


PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # With the feed-forward layers; no modulation, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2"),
}
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    guidance=4.0,  # the pipeline's default
    presets=PRESETS, kohya=Kohya(imported=False))  # the authors name layers as diffusers does; ComfyUI reads them so
