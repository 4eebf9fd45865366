"""Ovis-Image: FLUX.1's transformer without pooled text and guidance, and with numbered text tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from train.models.families import flux, packing
from train.models.family import Conditions, Prompted

if TYPE_CHECKING:
    from torch import Tensor


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself."""
    hidden_BLD = given.text["hidden"]
    packed = transformer(
        hidden_states=packing.pack(noised_BChw), timestep=sigma_B, encoder_hidden_states=hidden_BLD,
        txt_ids=_numbers(hidden_BLD), img_ids=packing.positions(noised_BChw), return_dict=False)[0]
    return packing.unpack(packed, (noised_BChw.shape[-1], noised_BChw.shape[-2]))


def _numbers(hidden_BLD: Tensor) -> Tensor:
    """[L, 3] float32: the number of each token on axes 1 and 2, zero on axis 0."""
    count = hidden_BLD.shape[1]
    found = hidden_BLD.new_zeros((count, 3)).float()
    found[:, 1:] += found.new_tensor(range(count))[:, None]
    return found


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `OvisImagePipeline.__call__`, whose negative prompt is "" unless none is asked for."""
    return {"prompt_embeds": prompted.positive["hidden"], "negative_prompt_embeds": prompted.negative["hidden"],
            "negative_prompt": None, "latents": packing.pack(prompted.latent_1Chw),
            "guidance_scale": prompted.guidance}


# The layers are named as FLUX.1's. The guidance is the pipeline's default.
DENOISER = replace(flux.DENOISER, predict=predict, call=call, takes_guidance=False, guidance=5.0, kohya=None,
                   further=())
