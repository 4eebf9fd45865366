"""PixArt Alpha and Sigma: a transformer with cross-attention to the text, which also predicts the variance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from prep.models.family import ATTENTION_MASK
from train.models.families import padding, sd15
from train.models.family import Conditions, Prompted

if TYPE_CHECKING:
    from torch import Tensor


def predict(transformer: Any, noised_BChw: Tensor, timestep_B: Tensor, given: Conditions) -> Tensor:
    """The transformer's noise: the first half of its answer, if that has variances too."""
    answer_BChw: Tensor = transformer(
        noised_BChw, encoder_hidden_states=given.text["hidden"], timestep=timestep_B,
        encoder_attention_mask=given.text[ATTENTION_MASK], added_cond_kwargs=_sizes(transformer, given.sizes_B6),
        return_dict=False)[0]
    return answer_BChw[:, :noised_BChw.shape[1]]


def _sizes(transformer: Any, sizes_B6: Tensor) -> Mapping[str, Tensor | None]:
    """Alpha at 1024 pixels is told the size of the picture [B, 2] and the aspect ratio of its bucket [B, 1].

    As its authors trained it (PixArt-alpha diffusion/data/datasets/InternalData_ms.py: img_hw is the file's height and
    width). Both stay float32: bfloat16 has no 1001, and the transformer embeds them before it casts.
    """
    if not transformer.use_additional_conditions:
        return {"resolution": None, "aspect_ratio": None}
    return {"resolution": sizes_B6[:, :2], "aspect_ratio": sizes_B6[:, 4:5] / sizes_B6[:, 5:6]}


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of both pipelines' `__call__`; without binning, which would make pictures of other sizes."""
    return {**padding.embeddings(prompted), "negative_prompt": None, "latents": prompted.latent_1Chw,
            "guidance_scale": prompted.guidance, "use_resolution_binning": False}


def prepare(pipeline: Any, _: Size) -> None:
    """Lets the pipeline make a picture in one step.

    Alpha's takes the second output of an only step, which few schedulers have: the clean latent that distilled models
    predict. It gets the first one there, too, where every other pipeline finds the latent after the last step.
    """
    scheduler = pipeline.scheduler
    if "step" in vars(scheduler):  # prepared for an earlier picture
        return
    own = scheduler.step

    @wraps(own)  # pipelines look at its signature
    def step(*values: Any, **options: Any) -> tuple[Any, ...]:
        after = own(*values, **options)[0]
        return after, after

    scheduler.step = step


# The scheduler of the published pipelines, and the default guidance of `__call__`. Layers are named as the UNet's.
DENOISER = replace(sd15.DENOISER, predict=predict, call=call, sampler="DPMSolverMultistepScheduler", sampler_options={},
                   guidance=4.5, kohya=None, original=None, prepare=prepare)
