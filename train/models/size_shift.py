"""The shift of a flow's timesteps that grows with the size of the picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prep.errors import ConfigError, ModelError
from prep.geometry import Size
from prep.loader.timesteps import Timesteps
from prep.models.family import Family
from prep.models.files import FETCH_AGAIN
from prep.training.schema import TimestepDraws


def flux_shift(tokens: int, schedule: Mapping[str, Any]) -> float:
    """The shift for a picture of so many tokens, as `calculate_shift` of FLUX's pipeline and its scheduler have it.

    mu is on the line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift), and the shift e^mu;
    with `time_shift_type` "linear" it is mu.
    """
    least, most = schedule.get("base_image_seq_len", 256), schedule.get("max_image_seq_len", 4096)
    low, high = schedule.get("base_shift", 0.5), schedule.get("max_shift", 1.15)
    mu: float = low + (high - low) * (tokens - least) / (most - least)
    return mu if schedule.get("time_shift_type") == "linear" else math.exp(mu)


def chances_by_bucket(settings: TimestepDraws, shifts: Sequence[float]) -> list[Timesteps]:
    """The distribution of each bucket's timesteps, given its further shift."""
    return [Timesteps(distribution=settings.distribution, mean=settings.mean, std=settings.std,
                      mode_scale=settings.mode_scale, shift=settings.shift * more, low=settings.low, high=settings.high)
            for more in shifts]


def size_shifts(settings: TimestepDraws, family: Family, schedule: Mapping[str, Any],
                sizes: Sequence[Size]) -> tuple[float, ...]:
    """The further shift for each of `sizes`, in pixels; `schedule` is the scheduler's config.

    Raises `ConfigError` if that has no shift by size, `ModelError` if its numbers cannot be used.
    """
    if settings.shift_by_size == "none":
        return (1.0,) * len(sizes)
    if settings.shift_by_size == "area":
        return tuple(math.sqrt(width * height) / settings.base_side for width, height in sizes)
    if schedule.get("use_dynamic_shifting") is not True:
        raise ConfigError("timesteps.shift_by_size is 'schedule', but the model's scheduler config has the same shift "
                          "for every size, which training always has",
                          hint="--set timesteps.shift_by_size=none, or area")
    rule, side = family.shift or flux_shift, family.token_side
    try:
        shifts = tuple(rule((width // side) * (height // side), schedule) for width, height in sizes)
    except (TypeError, ValueError, ArithmeticError):
        shifts = ()
    if not shifts or not all(0 < shift < math.inf for shift in shifts):
        raise ModelError("the scheduler's config gives no usable shift by size", hint=FETCH_AGAIN)
    return shifts
