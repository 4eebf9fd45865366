"""Checks, by the config of a model's denoiser, whether it takes the rows and the buckets of a dataset.

`prep encode` asks before it encodes, since `train` would refuse what it makes; `train` asks of the model that it is
given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from prep.errors import ModelError
from prep.geometry import Size
from prep.models.family import Family, Shape


def check_widths(model: Path, family: Family, config: Mapping[str, Any], text: Mapping[str, Shape], hint: str) -> None:
    """Raises `ModelError` if the denoiser takes latents or text of other widths. `text`: shapes of the arrays of a text
    row; those that are not there are not checked."""
    shapes = {"latent": (family.latent_channels,), **text}
    for name, (array, factor) in family.config_widths.items():
        wanted = shapes[array][-1] * factor if array in shapes else None
        if wanted is not None and config.get(name) != wanted:
            raise ModelError(f"{model / family.denoiser} has {name} {config.get(name)!r}, but the cache's rows have "
                             f"{wanted}", hint=hint)


def check_sizes(model: Path, family: Family, config: Mapping[str, Any], buckets: Iterable[Size]) -> None:
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
