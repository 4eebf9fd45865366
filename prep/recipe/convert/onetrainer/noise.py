"""Converts OneTrainer's loss, noise and timesteps, and the average of the weights."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.onetrainer.family import is_shifted, part_of
from prep.recipe.convert.training import Training, number_of

_DISTRIBUTIONS: Mapping[str, str] = {"UNIFORM": "uniform", "LOGIT_NORMAL": "logit-normal", "HEAVY_TAIL": "mode"}
_LOSSES: Mapping[str, float] = {"mse": 1.0, "mae": 0.0, "log_cosh": 0.0, "huber": 0.0}  # OneTrainer's defaults


def put_loss(config: ToolConfig, training: Training) -> None:
    """Converts masks, weights of the loss, noise and EMA."""
    if config.any("masked_training"):
        training.put("loss.masked", True, "masked_training")
        weight = number_of(config.any("unmasked_weight"))
        training.put_nearest("loss.unmasked_weight", 0.1 if weight is None else weight, "unmasked_weight")
        by_area = bool(config.any("normalize_masked_area_loss"))
        training.put("loss.normalize_area", by_area, "normalize_masked_area_loss")
        kept = number_of(config.any("masked_prior_preservation_weight"))
        if kept and training.settings["method"] == "lora":  # without effect on others
            training.put_nearest("preserve.unmasked", kept, "masked_prior_preservation_weight")
    else:
        training.put("loss.masked", False, "masked_training")  # although there may be masks
        for name in ("unmasked_weight", "normalize_masked_area_loss", "unmasked_probability",
                     "masked_prior_preservation_weight"):
            config.any(name)
    kind, strength = str(config.any("loss_weight_fn") or "CONSTANT"), number_of(config.any("loss_weight_strength"))
    if kind == "MIN_SNR_GAMMA":
        training.put_nearest("loss.min_snr", 5.0 if strength is None else strength, "loss_weight_strength")
    elif kind == "DEBIASED_ESTIMATION":
        training.put_debiased("loss_weight_fn", kind, predicts_v=bool(
            config.any("rescale_noise_scheduler_to_zero_terminal_snr")))
    elif kind != "CONSTANT":
        training.note("loss_weight_fn", kind, "only Min-SNR and debiased estimation are converted")
    if config.any("rescale_noise_scheduler_to_zero_terminal_snr"):  # which OneTrainer trains to predict v
        training.put("zero_terminal_snr", True, "rescale_noise_scheduler_to_zero_terminal_snr")
        training.put("prediction", "v_prediction", "rescale_noise_scheduler_to_zero_terminal_snr")
    if str(config.any("model_type")) == "FLUX_DEV_1":
        guidance = number_of(part_of(config, "transformer").get("guidance_scale"))
        training.put_nearest("guidance_embedding", 1.0 if guidance is None else guidance, "transformer.guidance_scale")
    if offset := number_of(config.any("offset_noise_weight")):
        training.put_nearest("noise.offset", offset, "offset_noise_weight")
        if config.any("generalized_offset_noise"):
            training.note("generalized_offset_noise", True, "the offset is the same at each timestep: no counterpart")
    if extra := number_of(config.any("perturbation_noise_weight")):
        training.note("perturbation_noise_weight", extra, "no counterpart: noise.perturbation leaves the target as it "
                      "is, and OneTrainer adds the noise to it, too")
    _ema(config, training)


def put_errors(config: ToolConfig, training: Training) -> None:
    """Converts the error of a prediction: squared, Huber's, or a sum that has no counterpart."""
    strengths = {name: usual if (strength := number_of(config.any(f"{name}_strength"))) is None else strength
                 for name, usual in _LOSSES.items()}
    delta = number_of(config.any("huber_delta"))
    used = {name: strength for name, strength in strengths.items() if strength}
    if list(used) == ["huber"]:
        training.put_nearest("loss.huber", 1.0 if delta is None else delta, "huber_delta")
        training.note("huber_strength", used["huber"], "loss.huber is the squared error up to there, twice "
                      "OneTrainer's Huber loss of strength 1: an optimizer that does not scale gradients takes larger "
                      "steps")
    elif used != {"mse": 1}:
        terms = ", ".join(f"{name} {strength:g}" for name, strength in used.items()) or "none"
        training.note("loss", None, f"the sum of losses, {terms}, has no counterpart; the squared error is written")


def put_draws(config: ToolConfig, training: Training) -> None:
    """Converts how timesteps are drawn (modules/modelSetup/mixin/ModelSetupNoiseMixin.py)."""
    kind, weight, bias, shift, low, high = (config.any(name) for name in (
        "timestep_distribution", "noising_weight", "noising_bias", "timestep_shift", "min_noising_strength",
        "max_noising_strength"))
    scale, mean, shift, low, high = (usual if (number := number_of(value)) is None else number for value, usual in (
        (weight, 0.0), (bias, 0.0), (shift, 1.0), (low, 0.0), (high, 1.0)))
    name = _DISTRIBUTIONS.get(str(kind or "UNIFORM"), "")
    if not name:
        training.note("timestep_distribution", kind, "no counterpart; uniform is written")
    training.put("timesteps.distribution", name or "uniform", "timestep_distribution")
    if name == "logit-normal":
        training.put_nearest("timesteps.mean", mean, "noising_bias")
        training.put_nearest("timesteps.std", scale + 1, "noising_weight")
    elif name == "mode":
        training.put_nearest("timesteps.mode_scale", scale, "noising_weight")
    if config.any("dynamic_timestep_shifting") and is_shifted(config):
        training.put("timesteps.shift_by_size", "schedule", "dynamic_timestep_shifting")
    elif shift != 1:
        training.put_nearest("timesteps.shift", shift, "timestep_shift")
        training.note("timestep_shift", shift, "timesteps.shift comes on top of the schedule's own: divide it by "
                      "'shift' of the scheduler's config, unless that has use_dynamic_shifting")
    if shift != 1 and (low, high) != (0, 1):
        training.note("timestep_shift", shift, "here it shifts within the range of timesteps, in OneTrainer what was "
                      "drawn from the range")
    training.put_range(low, high, ("min_noising_strength", "max_noising_strength"))


def _ema(config: ToolConfig, training: Training) -> None:
    decay, every = number_of(config.any("ema_decay")), number_of(config.any("ema_update_step_interval"))
    if str(config.any("ema") or "OFF") == "OFF":
        return
    if training.settings.get("optimizer.name") == "adamw-schedule-free":
        training.note("ema", config.any("ema"), "'adamw-schedule-free' averages the weights itself; not written")
    else:
        decay, every = 0.999 if decay is None else decay, 5 if every is None else every
        spread = decay ** (1 / every) if 0 < decay < 1 and every > 1 else decay  # over the steps between two updates
        training.put("ema.decay", round(spread, 7), "ema_decay")
        if config.any("ema") == "CPU":
            training.put("ema.device", "cpu", "ema")
