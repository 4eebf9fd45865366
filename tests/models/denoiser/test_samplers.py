"""Samplers for predictions of epsilon and v, on a model whose answer is known: its data have a normal distribution."""

from __future__ import annotations

import inspect

import diffusers
import pytest
import torch

from prep.errors import ConfigError
from prep.models.denoiser.samplers import (
    BY_SHIFT,
    DIFFUSION,
    EULER,
    HEUN,
    LIBRARIES,
    diffusion_options,
    flow_options,
    require_steps,
)

# As in scheduler_config.json of the published models.
SCHEDULES = {
    "Stable Diffusion": {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1,
                         "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True},
    "PixArt": {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear", "num_train_timesteps": 1000,
               "algorithm_type": "dpmsolver++", "solver_order": 2, "solver_type": "midpoint", "steps_offset": 0,
               "lower_order_final": True, "lambda_min_clipped": float("-inf"), "timestep_spacing": "linspace",
               "use_karras_sigmas": False, "euler_at_final": False, "thresholding": False}}
MEAN, STD = 0.7, 0.5
OTHERS = "expected 1, or 3 or more"


def answered(noised, timestep, prediction, levels):
    """What a model that has learned the distribution predicts; between timesteps as of the levels between."""
    least = min(int(timestep), 998)
    level = levels[least].log().lerp(levels[least + 1].log(), float(timestep) - least).exp()
    signal, noise = level.sqrt(), (1 - level).sqrt()
    clean = MEAN + signal * STD**2 / (level * STD**2 + 1 - level) * (noised.double() - signal * MEAN)
    epsilon = (noised.double() - signal * clean) / noise
    return (epsilon if prediction == "epsilon" else signal * epsilon - noise * clean).float()


def drawn(name, prediction, schedule="Stable Diffusion", steps=40):
    """4,096 numbers that the scheduler draws from the model, as a pipeline asks it."""
    config = SCHEDULES[schedule]
    levels = diffusers.DDIMScheduler.from_config(config).alphas_cumprod.double()
    scheduler = getattr(diffusers, name).from_config({**config, **diffusion_options(name), "noise_sampler_seed": 1,
                                                      "prediction_type": prediction})
    scheduler.set_timesteps(steps)
    options = {"generator": torch.Generator().manual_seed(1)}
    options = options if "generator" in inspect.signature(scheduler.step).parameters else {}
    value = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0)) * scheduler.init_noise_sigma
    for time in scheduler.timesteps:
        asked = answered(scheduler.scale_model_input(value, time), time, prediction, levels)
        value = scheduler.step(asked, time, value, **options, return_dict=False)[0]
    return value


@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # of diffusers with NumPy 2
@pytest.mark.filterwarnings("ignore:Should have t:UserWarning")  # of torchsde, which `pictures` silences as well
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", DIFFUSION)
def test_every_sampler_draws_what_the_model_has_learned(name, prediction, schedule):
    pytest.importorskip(LIBRARIES.get(name, "torch"))
    found = drawn(name, prediction, schedule)
    assert abs(float(found.mean()) - MEAN) < 0.08 and abs(float(found.std()) - STD) < 0.1, (found.mean(), found.std())


@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Should have t:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (3, 4))])
@pytest.mark.parametrize("name", DIFFUSION)
def test_few_steps_are_taken_or_refused(name, steps, schedule):
    pytest.importorskip(LIBRARIES.get(name, "torch"))
    for prediction in ("epsilon", "v_prediction"):
        if (name, steps, schedule) == ("KDPM2AncestralDiscreteScheduler", 2, "PixArt"):
            with pytest.raises(ConfigError) as error:
                require_steps(name, SCHEDULES[schedule], steps)
            assert error.value.message == f"{name} cannot make pictures of this model in 2 steps, {OTHERS}"
            assert error.value.hint.startswith("set sample.steps (--steps, or --s of a prompt) to another number, or ")
            with pytest.raises(ValueError, match="NaN"):  # else it is offered again
                drawn(name, prediction, schedule, steps)
        else:
            require_steps(name, SCHEDULES[schedule], steps)
            assert torch.isfinite(drawn(name, prediction, schedule, steps)).all()


@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("schedule", [{"shift": 3.0}, {"shift": 1.0, "use_dynamic_shifting": True}])
@pytest.mark.parametrize("name", [EULER, HEUN, *BY_SHIFT])
def test_few_steps_along_a_flow(name, schedule, steps):
    config = {"num_train_timesteps": 1000, **schedule}
    scheduler = getattr(diffusers, name).from_config({**config, **flow_options(name, config)})
    takes_shift = "mu" in inspect.signature(scheduler.set_timesteps).parameters
    scheduler.set_timesteps(steps, **({"mu": 1.0} if takes_shift and len(schedule) > 1 else {}))
    value = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    for time in scheduler.timesteps:
        value = scheduler.step(0.1 * value, time, value, return_dict=False)[0]
    assert torch.isfinite(value).all()


@pytest.mark.parametrize("name", ["EDMEulerScheduler", "LCMScheduler"])
def test_those_that_are_refused_draw_something_else(name):
    for found in (drawn(name, "epsilon"), drawn(name, "v_prediction")):
        assert abs(float(found.mean()) - MEAN) > 0.2 or abs(float(found.std()) - STD) > 0.15, found.std()


@pytest.mark.parametrize("name", ["LCMScheduler", "TCDScheduler"])
def test_those_of_distilled_models_take_few_steps(name):
    with pytest.raises(ValueError, match="original_steps"):
        drawn(name, "epsilon", steps=51)


def test_all_others_that_diffusers_takes_for_compatible_are_offered():
    """With each other, those of the published models among them."""
    compatible = {one.name for one in diffusers.schedulers.KarrasDiffusionSchedulers}
    assert {"PNDMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"} < compatible
    assert compatible - set(DIFFUSION) == {"EDMEulerScheduler"}
