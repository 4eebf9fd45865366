"""The noise schedules of the published models."""

from __future__ import annotations

from typing import Any

import diffusers

_untyped: Any = diffusers  # its constructors have no type annotations


def ddim(prediction: str = "epsilon") -> Any:
    """Stable Diffusion's schedule; `prediction` is "epsilon" or "v_prediction"."""
    return _untyped.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1, prediction_type=prediction, timestep_spacing="leading",
    )


def kolors() -> Any:
    """Kolors': 1100 levels, which end in more noise than Stable Diffusion's."""
    return _untyped.EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.014, beta_schedule="scaled_linear", num_train_timesteps=1100, steps_offset=1,
        timestep_spacing="leading",
    )


def pixart() -> Any:
    """PixArt's: betas that grow linearly."""
    return _untyped.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")


def flow(shift: float = 1.0, **options: Any) -> Any:
    """Flow matching, with a shift of the timesteps that is the same for every size."""
    return _untyped.FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False, **options)


def flow_solver(shift: float) -> Any:
    """SANA's: DPM-Solver along a flow."""
    return _untyped.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True,
                                                flow_shift=shift)


def dynamic_flow(shift: float = 1.0, **options: Any) -> Any:
    """Flow matching, with a shift of the timesteps that grows with the picture's size."""
    return _untyped.FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=True, **options)
