"""CogView4: the last layer but one of GLM for the tokens of a caption, and a VAE whose latents need no scaling.

Sources: `CogView4Pipeline` in diffusers 0.42, whose `encode_prompt` pads the longest caption of a batch on the left to
a multiple of 16 tokens, and the others to the same length. Neither GLM nor the transformer masks this padding, so a row
depends on the captions beside it: each is encoded alone, as for one picture. 1024 tokens are the pipeline's default;
the transformer takes patches of 2 × 2 latent cells. The VAE of THUDM/CogView4-6B has a scaling factor of 1.

The transformer is told sizes, crops and a time. The pipeline shifts the noise of each step by the picture's size, but
tells the transformer the time before that shift; so do its authors in training (THUDM/CogKit, get_sigmas and
get_timestep of the CogView4 trainer).
"""

from __future__ import annotations

import math
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

if TYPE_CHECKING:
    from torch import Tensor

MULTIPLE = 16  # of tokens


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of GLM. Captions are cut off before they are padded."""
    return {"hidden": (-(-options.max_length // MULTIPLE) * MULTIPLE, configs.width("text_encoder", "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, with the padding of that caption alone."""
    rows = [pipeline.encode_prompt([caption], do_classifier_free_guidance=False, device=device,
                                   max_sequence_length=options.max_length)[0] for caption in captions]
    return [{"hidden": hidden_1LD[0]} for hidden_1LD in rows]


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="trimmed", max_length=1024, longest=1024,
                    shapes=shapes, encode=encode)


# ---- the denoiser ----------------------------------------------------------------------------------------------------

# Of the published model's scheduler, and defaults of the pipeline.
SCHEDULE: Mapping[str, Any] = {"use_dynamic_shifting": True, "time_shift_type": "linear", "base_image_seq_len": 256,
                               "base_shift": 0.25, "max_shift": 0.75}


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity. The texts of each length have a call of their own: padding would be attended."""
    height, width = noised_BChw.shape[-2:]
    shift, sizes_B6 = shift_of(height // 2 * (width // 2), conditions.schedule), conditions.sizes_B6
    time_B = 1000 * unshifted(sigma_B, shift)

    def answer(numbers: list[int], hidden_GLD: Tensor) -> Tensor:
        velocity_GChw: Tensor = transformer(
            noised_BChw[numbers], encoder_hidden_states=hidden_GLD, timestep=time_B[numbers],
            original_size=sizes_B6[numbers, :2], crop_coords=sizes_B6[numbers, 2:4],
            target_size=sizes_B6[numbers, 4:], return_dict=False)[0]
        return velocity_GChw

    return padding.by_length(conditions.text, "hidden", answer)


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


SAMPLING = SamplePipeline(call=call, unpack=sd15.unpack, sampler=EULER, guidance=5.0)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

LORA = LoraLayers(presets=sd15.PRESETS, kohya=None, in_comfyui=False)  # layers are named as the UNet's


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "GlmModel"), ("transformers", "GlmForCausalLM")),
    # The second is what transformers 5 calls the first.
    "tokenizer": (("transformers", "PreTrainedTokenizerFast"), ("transformers", "TokenizersBackend")),
    "transformer": (("diffusers", "CogView4Transformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    name="cogview4", models=("CogView4",), pipelines=("CogView4Pipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024,
    scaling_factor="1", shift_factor="0", predictions=("flow",), text=TEXT,
    predict=predict, by_length="always", shift=shift_of, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="cogview4"),
    config_widths={"in_channels": ("latent", 1), "text_embed_dim": ("hidden", 1)},
)
