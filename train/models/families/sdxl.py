"""Stable Diffusion XL: a UNet that also takes a pooled text vector and the sizes of the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from train.models.families import sd15
from train.models.families.unet import original_rules
from train.models.family import Conditions, Prompted
from train.models.naming import Kohya

if TYPE_CHECKING:
    from torch import Tensor


def predict(unet: Any, noised_BChw: Tensor, timestep_B: Tensor, given: Conditions) -> Tensor:
    """The UNet's answer. Sizes stay float32: bfloat16 has no 1001, and the UNet embeds them before it casts."""
    more = {"text_embeds": given.text["pooled"], "time_ids": given.sizes_B6}
    answer_BChw: Tensor = unet(noised_BChw, timestep_B, encoder_hidden_states=given.text["hidden"],
                               added_cond_kwargs=more).sample
    return answer_BChw


def call(unet: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `StableDiffusionXLPipeline.__call__`; its sizes are those of the picture."""
    return {**sd15.call(unet, prompted), "pooled_prompt_embeds": prompted.positive["pooled"],
            "negative_pooled_prompt_embeds": prompted.negative["pooled"]}


# The names of the authors' code: sd-scripts has its own UNet for SDXL, with the layers of these. The guidance is the
# pipeline's default.
DENOISER = replace(sd15.DENOISER, predict=predict, call=call, guidance=5.0,
                   kohya=Kohya(usual=True, rules=original_rules(()), counted=True))
