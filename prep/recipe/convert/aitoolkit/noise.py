"""Converts the noise, timesteps and loss with which ai-toolkit trains.

A flow draws t of `timestep_type` without its schedule's own shift, except for the types named shift, which have just
that (toolkit/samplers/custom_flowmatch_sampler.py). A UNet draws its timesteps evenly.
"""

from __future__ import annotations

from prep.recipe.convert.aitoolkit.family import DYNAMIC, GUIDED, family_of, is_unet
from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.training import Training, number_of

_EVEN = ("linear", "weighted")
_SHIFTED = ("shift", "flux_shift", "lumina2_shift")
_STEPS = 1000  # of its noise schedules
_OF_DIFFUSION = ("min_snr_gamma", "noise_offset")  # no sense for flows


def put_noise(train: ToolConfig, model: ToolConfig, training: Training) -> None:
    """Converts noise, timesteps, the weights of the loss, and the number that guided models are given."""
    if is_unet(model):
        _of_diffusion(train, training)
    else:
        for name in _OF_DIFFUSION:
            if value := number_of(train.any(name)):
                training.note(f"train.{name}", value, "only for models that predict epsilon or v; not written")
        if str(train.any("noise_scheduler") or "flowmatch").lower() != "flowmatch":
            training.note("train.noise_scheduler", train.any("noise_scheduler"), "flows are trained as flows")
        _of_flow(train, family_of(model), training)
    if (kind := str(train.any("content_or_style") or "balanced")) != "balanced":
        training.note("train.content_or_style", kind, "favors "
                      f"{'more' if kind == 'content' else 'less'} noise by a cube: no counterpart; the nearest is "
                      f"timesteps.mean {'above' if kind == 'content' else 'below'} 0 with logit-normal")
    if (loss := str(train.any("loss_type") or "mse")) != "mse":
        training.note("train.loss_type", loss, "no counterpart; the squared error is written")
    if model.any("is_v_pred") is True:
        training.put("prediction", "v_prediction", "model.is_v_pred")
    scale = number_of(train.any("cfg_scale"))
    if family_of(model) in GUIDED:
        training.put_nearest("guidance_embedding", 1.0 if scale is None else float(scale), "train.cfg_scale")
    elif scale not in (None, 1):
        training.note("train.cfg_scale", scale, "no counterpart")


def _of_diffusion(train: ToolConfig, training: Training) -> None:
    """Converts what only models have that predict epsilon or v."""
    gamma, offset = (number_of(train.any(name)) for name in _OF_DIFFUSION)
    if gamma:
        training.put_nearest("loss.min_snr", float(gamma), "train.min_snr_gamma")
    if offset:
        training.put_nearest("noise.offset", float(offset), "train.noise_offset")
    if (scheduler := str(train.any("noise_scheduler") or "ddpm").lower()) != "ddpm":
        training.note("train.noise_scheduler", scheduler, "training follows the noise schedule of the model's "
                      "scheduler config")
    train.any("timestep_type")  # which is for flows, and in every file of its page
    _range(train, training)


def _of_flow(train: ToolConfig, family: str, training: Training) -> None:
    key, kind = "train.timestep_type", str(train.any("timestep_type") or "sigmoid")
    weighted = [name for name in ("linear_timesteps", "linear_timesteps2") if train.any(name)]
    even = "linear" if weighted else kind
    normal = even == "sigmoid"
    training.put("timesteps.distribution", "logit-normal" if normal else "uniform", key)
    if weighted or kind == "weighted":
        training.note(f"train.{weighted[0]}" if weighted else key, True if weighted else kind, "weights the loss by a "
                      "curve over the timesteps: no counterpart; drawn evenly, as there")
    if even in _SHIFTED:
        if family in DYNAMIC:
            training.put("timesteps.shift_by_size", "schedule", key)
    elif not normal and even not in _EVEN:
        training.note(key, kind, "no counterpart; uniform is written")
    elif family not in DYNAMIC:
        training.note(key, kind, "ai-toolkit leaves out the schedule's own shift: where its config has a shift other "
                      "than 1, and no use_dynamic_shifting, set timesteps.shift to 1 / that")
    if even in _EVEN:
        _range(train, training)
    else:
        for name, usual in (("min_denoising_steps", 0), ("max_denoising_steps", _STEPS - 1)):
            if (value := number_of(train.any(name))) not in (None, usual):
                training.note(f"train.{name}", value, "counts places in the drawn distribution, not noise levels: no "
                              "counterpart")


def _range(train: ToolConfig, training: Training) -> None:
    """Converts the range of timesteps, which are counted from the most noise, of 1,000."""
    first, last = (number_of(train.any(name)) for name in ("min_denoising_steps", "max_denoising_steps"))
    low = 0.0 if last is None else round(1 - (last + 1) / _STEPS, 6)
    high = 1.0 if first is None else round(1 - first / _STEPS, 6)
    training.put_range(low, high, ("train.max_denoising_steps", "train.min_denoising_steps"))
