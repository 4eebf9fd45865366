"""Converts the noise and the timesteps with which sd-scripts trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.kohya.family import OF_DIFFUSION, family_of, is_flow, of_gui
from prep.recipe.convert.training import Training, number_of

_DISCOUNT, _SHIFT = 0.3, 3.0  # the defaults of sd-scripts
_SAMPLINGS: Mapping[Any, str] = {**dict.fromkeys(("sigma", "uniform"), "uniform"),
                                 **dict.fromkeys(("sigmoid", "shift", "flux_shift"), "logit-normal")}
# weighting_scheme is a distribution of timesteps, or a weight of the loss by noise level.
_SCHEMES: Mapping[Any, str] = {"logit_normal": "logit-normal", "mode": "mode"}
_WEIGHTS: Mapping[Any, str] = {"cosmap": "cosmap", "sigma_sqrt": "inverse-square"}
_OF_DIFFUSION = ("noise_offset", "multires_noise_iterations", "min_snr_gamma", "debiased_estimation_loss",
                 "zero_terminal_snr", "v_parameterization")  # which sd-scripts ignores for flows


def put_noise(config: ToolConfig, training: Training) -> None:
    """Converts noise offset, multi-resolution noise and input perturbation; the GUI has one of the first two."""
    _timesteps(config, training)
    if is_flow(config):
        for name in _OF_DIFFUSION:
            if (value := config.any(name)) and number_of(value) != 0:
                training.note(name, value, "sd-scripts ignores it for flows; not written")
    else:
        _of_diffusion(config, training)
    gamma = number_of(config.any("ip_noise_gamma"))
    if gamma:
        training.put_nearest("noise.perturbation", gamma, "ip_noise_gamma")
    guidance = number_of(config.any("guidance_scale"))  # the GUI writes it for every model
    if guidance is not None and family_of(config) in ("flux", "flow", "") and config.any("flux1_checkbox") is not False:
        training.put_nearest("guidance_embedding", guidance, "guidance_scale")
    for name in ("noise_offset", "ip_noise_gamma"):
        if config.any(f"{name}_random_strength") and config.any(name):
            training.note(f"{name}_random_strength", True, "the strength is the same for every sample: no counterpart")


def _of_diffusion(config: ToolConfig, training: Training) -> None:
    """Converts what only models have that predict epsilon or v."""
    kind = config.any("noise_offset_type") or ""
    offset, gamma = number_of(config.any("noise_offset")), number_of(config.any("min_snr_gamma"))
    levels, discount = (number_of(config.any(f"multires_noise_{name}")) for name in ("iterations", "discount"))
    if offset and kind != "Multires":
        training.put_nearest("noise.offset", offset, "noise_offset")
    if levels and kind != "Original":
        training.put_nearest("noise.pyramid", _DISCOUNT if discount is None else discount, "multires_noise_discount")
        training.put_nearest("noise.pyramid_levels", int(levels), "multires_noise_iterations")
    if gamma is not None:
        training.put_nearest("loss.min_snr", gamma, "min_snr_gamma")
    if config.any("v_parameterization"):
        training.put("prediction", "v_prediction", "v_parameterization")
    if config.any("debiased_estimation_loss"):
        training.put_debiased("debiased_estimation_loss", True, predicts_v=bool(config.any("v_parameterization")),
                              beside="min_snr_gamma" if config.any("min_snr_gamma") else "")
    if config.any("zero_terminal_snr"):
        training.put("zero_terminal_snr", True, "zero_terminal_snr")


def _timesteps(config: ToolConfig, training: Training) -> None:
    """Converts the draws of timesteps for flows (sd-scripts: library/flux_train_utils.py).

    "sigma" draws a place in the levels of a scheduler that is shifted itself, which lists the most noise first. The GUI
    writes all this for every model.
    """
    kind, scale = config.any("timestep_sampling"), number_of(config.any("sigmoid_scale"))
    shift, family = number_of(config.any("discrete_flow_shift")), family_of(config)
    if family == "sd3":
        _of_sd3(config, training)
        return
    if not is_flow(config):
        _range(config, training)
    if family in OF_DIFFUSION or (config.any("flux1_checkbox") is False and not is_flow(config)):
        return
    gui = of_gui(config) or config.has("flux1_checkbox")
    scheme = "" if gui else str(config.any("weighting_scheme"))  # the GUI's is for SD 3
    if config.any("model_prediction_type") in (None, "sigma_scaled"):
        _weighted(config, scheme, training)
    if kind is None and shift is None and scheme not in _SCHEMES:
        return
    if (kind := str(kind or "sigma")) not in _SAMPLINGS:
        training.note("timestep_sampling", kind, "no counterpart")
        return
    if kind == "sigma":
        _scheme(config, scheme, training, from_noise=True)
    else:
        training.put("timesteps.distribution", _SAMPLINGS[kind], "timestep_sampling")
    if scale not in (None, 1) and _SAMPLINGS[kind] == "logit-normal":
        training.put_nearest("timesteps.std", scale, "sigmoid_scale")
    if kind in ("shift", "sigma"):
        training.put_nearest("timesteps.shift", _SHIFT if shift is None else shift, "discrete_flow_shift")
        training.note("discrete_flow_shift", shift, "timesteps.shift comes on top of the schedule's own: divide it by "
                      "'shift' of the scheduler's config, unless that has use_dynamic_shifting")
    if kind == "flux_shift":
        training.put("timesteps.shift_by_size", "schedule", "timestep_sampling")


def _of_sd3(config: ToolConfig, training: Training) -> None:
    """Converts the draws for SD 3, from the least noise on, shifted by training_shift alone (sd3_train_utils.py)."""
    scheme, shift = str(config.any("weighting_scheme")), number_of(config.any("training_shift"))
    _scheme(config, scheme, training, from_noise=False)
    _weighted(config, scheme, training)
    training.put_nearest("timesteps.shift", 1.0 if shift is None else shift, "training_shift")
    training.note("training_shift", shift, "timesteps.shift comes on top of the schedule's own: divide it by 'shift' "
                  "of the scheduler's config, which is 3 in SD 3's and 3.5's")
    _range(config, training)


def _scheme(config: ToolConfig, scheme: str, training: Training, *, from_noise: bool) -> None:
    """Converts the distribution of timesteps that weighting_scheme names. `from_noise`: its place 0 is the most noise,
    which turns a mean of the logit around; the other distributions are the same from both ends."""
    mean, spread, scale = (number_of(config.any(name)) for name in ("logit_mean", "logit_std", "mode_scale"))
    training.put("timesteps.distribution", _SCHEMES.get(scheme, "uniform"), "weighting_scheme")
    if scheme == "logit_normal":
        training.put_nearest("timesteps.mean", -mean if mean and from_noise else mean or 0.0, "logit_mean")
        training.put_nearest("timesteps.std", 1.0 if spread is None else spread, "logit_std")
    elif scheme == "mode":
        training.put_nearest("timesteps.mode_scale", 1.29 if scale is None else scale, "mode_scale")


def _weighted(config: ToolConfig, scheme: str, training: Training) -> None:
    """Converts a weight by noise level, which is for flows; a file may be of one without saying so."""
    others = [name for name in ("min_snr_gamma", "debiased_estimation_loss") if config.any(name)]
    if scheme in _WEIGHTS and others and not is_flow(config):
        training.note("weighting_scheme", scheme, f"sd-scripts has it for flows, for which it ignores {others[0]}; "
                      "not written")
    elif scheme in _WEIGHTS:
        training.put("loss.weighting", _WEIGHTS[scheme], "weighting_scheme")


def _range(config: ToolConfig, training: Training) -> None:
    """Converts the timesteps that are drawn, of 1,000."""
    low, high = (number_of(config.any(name)) for name in ("min_timestep", "max_timestep"))
    training.put_range((low or 0) / 1000, (1000 if high is None else high) / 1000, ("min_timestep", "max_timestep"))
