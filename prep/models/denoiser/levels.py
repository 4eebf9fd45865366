"""Checks the numbers of a scheduler's config that decide its levels of noise, without torch, so in milliseconds.

What only computing the levels tells is found by `train.models.denoiser.noise_schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prep.errors import ModelError
from prep.models.files import FETCH_AGAIN, Model
from prep.parse import brief

MOST_TIMESTEPS = 100_000  # published models have 1,000


def check_levels(schedule: Mapping[str, Any], model: Model, *, flow: bool) -> None:
    """Raises `ModelError` if the scheduler's config of `model` can give no levels, or none from 0 to 1.

    `flow`: as `FlowMatchEulerDiscreteScheduler` reads it, which shifts levels by size later; else as `DDPMScheduler`.
    """
    check_timesteps(schedule, model)
    if flow and schedule.get("use_dynamic_shifting") is not True:
        name = "flow_shift" if "shift" not in schedule and "flow_shift" in schedule else "shift"
        _require(schedule, model, name, 1.0, (math.ulp(0.0), math.inf), "a number above 0")
    if flow or schedule.get("trained_betas") is not None or schedule.get("beta_schedule", "linear") not in _BY_ENDS:
        return
    _require(schedule, model, "beta_start", 0.0001, (0.0, 1.0), "a number from 0 to below 1")
    _require(schedule, model, "beta_end", 0.02, (0.0, math.nextafter(1.0, 2.0)), "a number from 0 to 1")


_BY_ENDS = ("linear", "scaled_linear")  # beta_schedules between beta_start and beta_end


def check_timesteps(schedule: Mapping[str, Any], model: Model) -> None:
    """Raises `ModelError` for a number of timesteps that is none."""
    steps = schedule.get("num_train_timesteps", 1000)
    if type(steps) is not int or not 1 <= steps <= MOST_TIMESTEPS:
        raise _unusable(model, "num_train_timesteps", steps, f"a whole number from 1 to {MOST_TIMESTEPS}")


def _require(schedule: Mapping[str, Any], model: Model, name: str, usual: float, bounds: tuple[float, float],
             wanted: str) -> None:
    """Raises `ModelError` unless a number of the config, or the usual one, is in `bounds`: the second one is beyond."""
    value = schedule.get(name, usual)
    if type(value) not in (int, float) or not bounds[0] <= value < bounds[1]:
        raise _unusable(model, name, value, wanted)


def _unusable(model: Model, name: str, value: Any, wanted: str) -> ModelError:
    return ModelError(f"the scheduler's config in {model / 'scheduler'} has {name} {brief(value)}, expected {wanted}",
                      hint=FETCH_AGAIN)
