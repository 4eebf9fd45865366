"""Converts diffusion-pipe's optimizer, learning rate and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.training import Training, number_of
from prep.training.optimizers import OPTIMIZERS

# By its type without regard to case; names it does not know itself are of the library pytorch_optimizer.
_OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw", "adamw_optimi"), "adamw"), **dict.fromkeys(("adamw8bit", "adamw8bitkahan"), "adamw-8bit"),
    "prodigy": "prodigy", "lion": "lion", "adafactor": "adafactor", "schedulefreeadamw": "adamw-schedule-free"}
_OPTIMI = ("adamw_optimi", "stableadamw")  # of the library optimi, with other defaults
_OPTIMI_BETAS, _OPTIMI_EPS = [0.9, 0.99], 1e-6
_FLOOR = 1e-6  # the rate to which its cosine falls
_SETTINGS = ("weight_decay", "eps", "d_coef")


def put_optimizer(optimizer: ToolConfig, model: ToolConfig, top: ToolConfig, training: Training, batch: int) -> None:
    """Converts the optimizer with its settings, and the learning rate: that of the UNet, where there is one."""
    named = str(optimizer.any("type") or "adamw_optimi")
    name = _OPTIMIZERS.get(named.lower(), "adamw")
    if named.lower() not in _OPTIMIZERS:
        training.note("optimizer.type", named, "no counterpart; adamw is written, and the learning rate may not suit "
                      "it")
    rates = [(number_of(config.any(key)), f"{where}{key}") for config, where, key in (
        (top, "", "force_constant_lr"), (model, "model.", "unet_lr"), (optimizer, "optimizer.", "lr"))]
    rate, key = next(((rate, key) for rate, key in rates if rate is not None), (None, ""))
    if rate is not None:
        training.put("optimizer.lr", float(rate), key)
    clip = number_of(top.any("gradient_clipping"))
    training.put_nearest("optimizer.clip", 1.0 if clip is None else float(clip), "gradient_clipping")
    values: dict[str, tuple[Any, str]] = {
        setting: (number, f"optimizer.{setting}") for setting in _SETTINGS
        if (number := number_of(optimizer.any(setting))) is not None}
    if (betas := _betas(optimizer, named.lower(), batch)) is not None:
        values["betas"] = betas, "optimizer.betas"
    if named.lower() in _OPTIMI and "eps" not in values:
        values["eps"] = _OPTIMI_EPS, "optimizer.type"
    training.put_optimizer(name, {setting: value for setting, value in values.items()
                                  if setting in OPTIMIZERS[name].takes or value[1] != "optimizer.type"})
    training.put_full(half="", fused="optimizer.gradient_release" if optimizer.any("gradient_release") else "")
    for setting, value in optimizer.layers[0].table.items():
        if setting not in optimizer.layers[0].keys_read and value not in (None, False):
            optimizer.any(setting)
            training.note(f"optimizer.{setting}", value, "no counterpart")


def _betas(optimizer: ToolConfig, named: str, batch: int) -> list[float] | None:
    """The decay of the two moments, if the file says it; a half-life in samples decides the second."""
    given = optimizer.any("betas")
    numbers = [number_of(value) for value in given] if isinstance(given, list) else []
    betas = [value for value in numbers if value is not None]
    if len(betas) != 2:
        betas = list(_OPTIMI_BETAS) if named in _OPTIMI else []
    half = number_of(optimizer.any("beta2_half_life"))
    if betas and half and half > 0:
        betas[1] = round(0.5 ** (batch / half), 7)
    return betas or None


def put_schedule(top: ToolConfig, training: Training) -> None:
    """Converts the schedule, which is constant, linear or a cosine, and its warm-up."""
    kind, forced = str(top.any("lr_scheduler") or "constant"), top.has("force_constant_lr")
    free = training.settings["optimizer.name"] == "adamw-schedule-free"
    name = "constant" if forced or free else kind if kind in ("constant", "linear", "cosine") else "cosine"
    if name != kind:
        why = "force_constant_lr keeps the rate" if forced else "the optimizer averages the weights instead" if free \
            else "no counterpart"
        training.note("lr_scheduler", kind, f"{why}; {name} is written")
    training.put("schedule.name", name, "lr_scheduler")
    rate = training.settings.get("optimizer.lr")
    if name == "cosine" and kind == "cosine" and rate and rate > _FLOOR:
        training.put("schedule.floor", round(_FLOOR / rate, 9), "lr_scheduler")
    if (warmup := number_of(top.any("warmup_steps"))) is not None and not forced:
        training.put("schedule.warmup", int(warmup), "warmup_steps")
    elif warmup:
        training.note("warmup_steps", warmup, "force_constant_lr keeps the rate; not written")
