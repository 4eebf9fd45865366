"""CogView4: a transformer over text and picture that masks no padding, and is told sizes, crops and an unshifted time.

Its pipeline shifts the noise of each step by the picture's size, but tells the transformer the time before that shift;
so do its authors in training (THUDM/CogKit, get_sigmas and get_timestep of the CogView4 trainer).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.models.families import padding, sd15
from train.models.family import Conditions, DenoiserFamily, Prompted

if TYPE_CHECKING:
    from torch import Tensor

# Of the published model's scheduler, and defaults of the pipeline.
SCHEDULE: Mapping[str, Any] = {"use_dynamic_shifting": True, "time_shift_type": "linear", "base_image_seq_len": 256,
                               "base_shift": 0.25, "max_shift": 0.75}


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's velocity. The texts of each length have a call of their own: padding would be attended."""
    height, width = noised_BChw.shape[-2:]
    time_B, sizes_B6 = 1000 * unshifted(sigma_B, shift_of(height // 2 * (width // 2), given.schedule)), given.sizes_B6

    def answer(numbers: list[int], hidden_GLD: Tensor) -> Tensor:
        velocity_GChw: Tensor = transformer(
            noised_BChw[numbers], encoder_hidden_states=hidden_GLD, timestep=time_B[numbers],
            original_size=sizes_B6[numbers, :2], crop_coords=sizes_B6[numbers, 2:4],
            target_size=sizes_B6[numbers, 4:], return_dict=False)[0]
        return velocity_GChw

    return padding.by_length(given.text, "hidden", answer)


def shift_of(patches: int, schedule: Mapping[str, Any]) -> float:
    """The shift for a picture of so many patches: it grows with their square root, as in the pipeline's
    `calculate_shift`, unless the scheduler's config has one for all sizes.
    """
    known = {**SCHEDULE, **schedule}
    if not known["use_dynamic_shifting"]:
        return float(known["shift"])
    shift: float = known["base_shift"] + known["max_shift"] * math.sqrt(patches / known["base_image_seq_len"])
    return shift if known["time_shift_type"] == "linear" else math.exp(shift)


def unshifted(sigma_B: Tensor, shift: float) -> Tensor:
    """The time, 0 to 1, that is shifted to sigma = shift / (shift + 1 / time - 1)."""
    time_B: Tensor = sigma_B / (sigma_B + shift * (1 - sigma_B))
    return time_B


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `CogView4Pipeline.__call__`; its sizes are those of the picture."""
    positive_1LD, negative_1LD = (padding.cut(text, "hidden")[0] for text in (prompted.positive, prompted.negative))
    return {"prompt_embeds": positive_1LD, "negative_prompt_embeds": negative_1LD,
            "latents": prompted.latent_1Chw, "guidance_scale": prompted.guidance}


# Layers are named as the UNet's.
DENOISER = DenoiserFamily(
    predict=predict, call=call, unpack=sd15.unpack, sampler="FlowMatchEulerDiscreteScheduler", sampler_options={},
    guidance=5.0, presets=sd15.PRESETS, kohya=None, in_comfyui=False, shift=shift_of)
