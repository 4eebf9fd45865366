"""Checks, by a model's files alone, whether training could use its denoiser, its noise schedule, and a dataset's rows.

`prep encode` asks before it encodes, since `train` would refuse what it makes; `train` asks of the model that it is
given.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import isqrt
from typing import Any

from prep.errors import ModelError
from prep.geometry import Size
from prep.models.configs import Configs
from prep.models.denoiser.levels import check_levels
from prep.models.family import Family, Shape
from prep.models.files import Model, SingleFile
from prep.models.pipeline import SCHEDULER, schedule_in_code, scheduler_config, weighted_files
from prep.models.weights import has_weights


def check_schedule(model: Model, *, flow: bool) -> None:
    """Raises `ModelError` for a noise schedule without usable levels; `flow`: of a model that predicts a flow."""
    check_levels(scheduler_config(model), model, flow=flow)


def missing_files(model: Model, family: Family) -> tuple[str, ...]:
    """Checks the denoiser and the noise schedule; returns the files that are missing, relative to `model`. A computer
    that only encodes needs none of them.

    Raises `ModelError` as training does: for weights that are damaged, incomplete, quantized, or lead to other files,
    and for a noise schedule without usable levels.
    """
    missing = []
    for name in family.trained_with:
        if isinstance(model, SingleFile) or has_weights(model / name):
            weighted_files(model, name)
        else:
            missing.append(f"{name}/diffusion_pytorch_model.safetensors")
    if os.path.lexists(model / SCHEDULER) or schedule_in_code(model) is not None:
        check_schedule(model, flow="flow" in family.predictions)
    else:
        missing.append(SCHEDULER)
    return tuple(missing)


def check_widths(model: Model, family: Family, config: Mapping[str, Any], text: Mapping[str, Shape], hint: str) -> None:
    """Raises `ModelError` if the denoiser, or the conditioner before it, takes latents or text of other widths.
    `config`: the denoiser's. `text`: shapes of the arrays of a text row; those that are not there are not checked."""
    shapes, widths = {"latent": (family.input_channels,), **text}, [(family.denoiser, config, family.config_widths)]
    if family.conditioner is not None and os.path.lexists(model / family.conditioner.component / "config.json"):
        component = family.conditioner.component
        own, (made, taken) = Configs(model)(component), family.conditioner.joint
        widths.append((component, own, family.conditioner.config_widths))
        if own.get(made) != config.get(taken):
            raise ModelError(f"{model / component} has {made} {own.get(made)!r}, but {family.denoiser} has {taken} "
                             f"{config.get(taken)!r}", hint=hint)
    for component, found, by_name in widths:
        for name, (array, factor) in by_name.items():
            wanted = shapes[array][-1] * factor if array in shapes else None
            if wanted is not None and found.get(name) != wanted:
                raise ModelError(f"{model / component} has {name} {found.get(name)!r}, but the cache's rows have "
                                 f"{wanted}", hint=hint)


def check_sizes(model: Model, family: Family, config: Mapping[str, Any], buckets: Iterable[Size]) -> None:
    """Raises `ModelError` for a bucket with a side that is longer than the denoiser's table of positions, or one that
    is not square and has more patches than the denoiser pads to."""
    side = family.longest_side and family.longest_side(config)
    area = family.largest_area and family.largest_area(config)
    for width, height in buckets:
        if side is not None and max(width, height) > side:
            raise ModelError(f"{model} takes sides of at most {side} pixels, but the dataset has the bucket "
                             f"{width}x{height}",
                             hint=f"set image.longest = {side} in the recipe, and run prep encode again")
        if area is not None and width != height and width * height > area:
            raise ModelError(f"{model} takes at most {area} pixels of a picture that is not square, but the dataset "
                             f"has the bucket {width}x{height}",
                             hint=f"set image.resolution = {isqrt(area)} in the recipe, and run prep encode again")
