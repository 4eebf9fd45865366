"""Which of diffusers' schedulers make sample pictures of a model, and their settings for a flow. No torch.

A pipeline hands its scheduler what it wants the steps to be: nothing, the levels of noise (`sigmas`), or a shift by the
picture's size (`mu`). A scheduler that cannot take these stops it. Each family's module says which ones its pipeline
works with in diffusers 0.42, and with which kind of shift in the scheduler's config; `tests/whole/test_families.py`
tries every family with every scheduler.

Not among those of a flow: DEISMultistepScheduler and SASolverScheduler, which leave the noise of the last step in its
pictures, and FlowMatchLCMScheduler, which is for models that were distilled to few steps.

Not among those of epsilon and v: EDMEulerScheduler, which diffusers calls compatible, but which scales what goes in and
out as models were trained for by Karras et al. 2022, so that pictures of others diverge; LCMScheduler and TCDScheduler,
which are for distilled models and take at most 50 steps. `tests/models/denoiser/test_samplers.py` tries them on a model
whose answer is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from prep.errors import ConfigError

SAMPLERS = ("DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "EulerDiscreteScheduler",
            "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler", "DPMSolverMultistepScheduler",
            "DPMSolverSinglestepScheduler", "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler",
            "DEISMultistepScheduler", "UniPCMultistepScheduler", "LMSDiscreteScheduler", "DPMSolverSDEScheduler",
            "SASolverScheduler", "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
EULER, HEUN = "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"
MULTISTEP, SINGLESTEP, UNIPC = "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "UniPCMultistepScheduler"
DIFFUSION = tuple(name for name in SAMPLERS if name not in (EULER, HEUN))
# Those for which diffusers needs a library that it does not install itself, and that library.
LIBRARIES = {"LMSDiscreteScheduler": "scipy", "DPMSolverSDEScheduler": "torchsde"}
# Those that follow a noise schedule that was rescaled to end in pure noise; to the others diffusers gives the schedule
# as it was before, without a word.
RESCALED = ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", MULTISTEP,
            UNIPC)

# With which shift of a scheduler's config a pipeline works with a solver: the same for all sizes, by size, or both.
Shifts = Literal["static", "dynamic", "any"]
Solvers = Mapping[str, Shifts]
# Pipelines that set the number of steps and nothing else.
BY_STEPS: Solvers = {HEUN: "static", MULTISTEP: "static", SINGLESTEP: "static", UNIPC: "static"}
# They leave out sigmas for a solver along a flow, and always give it mu, which DPM-Solver takes for a shift by size.
BY_SHIFT: Solvers = {MULTISTEP: "dynamic", SINGLESTEP: "dynamic", UNIPC: "any"}
BY_SIGMAS: Solvers = {UNIPC: "any"}


def samplers(solvers: Solvers, schedule: Mapping[str, Any]) -> tuple[str, ...]:
    """The schedulers that can follow a flow of the scheduler's config `schedule`. The first one is the family's own."""
    dynamic = schedule.get("use_dynamic_shifting") is True
    by_line = dynamic and schedule.get("time_shift_type") == "linear"  # which DPM-Solver refuses
    if schedule.get("invert_sigmas") is True:  # time runs backwards, which only Euler's knows
        return (EULER,)
    return (EULER, *(name for name, shifts in solvers.items() if shifts in ("any", "dynamic" if dynamic else "static")
                     and not (by_line and name in (MULTISTEP, SINGLESTEP))))


def diffusion_options(sampler: str) -> dict[str, Any]:
    """What changes in the scheduler's config for `sampler` to make pictures with predictions of epsilon or v."""
    options: dict[str, Any] = {"clip_sample": False}  # latents are unbounded
    if sampler == "SASolverScheduler":  # which takes DPM-Solver's of the same name for its own
        options["algorithm_type"] = "data_prediction"
    if sampler == "PNDMScheduler":  # its first steps by Runge-Kutta need four or more; the published SD has none either
        options["skip_prk_steps"] = True
    return options


def require_steps(sampler: str, schedule: Mapping[str, Any], steps: int) -> None:
    """Raises `ConfigError` if `sampler` cannot take so many steps along the noise of the scheduler's config `schedule`.

    KDPM2's ancestral steps compute a difference of squares in float32. Two steps that span all of a linear schedule, as
    PixArt's, leave nothing of it but its rounding, whose root is not a number.
    """
    spanned = schedule.get("beta_schedule", "linear") == "linear" and (
        schedule.get("timestep_spacing", "linspace") == "linspace")
    if sampler == "KDPM2AncestralDiscreteScheduler" and steps == 2 and spanned:
        raise ConfigError(f"{sampler} cannot make pictures of this model in 2 steps, expected 1, or 3 or more",
                          hint="set sample.steps (--steps, or --s of a prompt) to another number, or leave "
                          "sample.sampler out for the usual one")


def flow_options(sampler: str, schedule: Mapping[str, Any]) -> dict[str, Any]:
    """What changes in the scheduler's config for `sampler` to follow a flow, along the levels of the config's shift.

    Other spacings of Euler's levels (Karras et al. and others) mean something else to these solvers.
    """
    if sampler in (EULER, HEUN):
        return {}
    spacings = {f"use_{name}_sigmas": False for name in ("karras", "exponential", "beta")}
    return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, **spacings,
            "flow_shift": schedule.get("flow_shift", schedule.get("shift", 1.0))}
