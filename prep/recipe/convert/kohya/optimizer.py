"""Converts sd-scripts' optimizer with its arguments, learning rate and schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.training import Training, number_of

_RATE = 2e-6  # the default of sd-scripts
_OF_SCHEDULES = ("lr_scheduler_num_cycles", "lr_scheduler_power", "lr_scheduler_min_lr_ratio")
_CYCLES = ("lr_scheduler_num_cycles", "schedule.cycles", int)
# Each schedule's name here, and its own settings. cosine_with_min_lr counts cycles differently, and has one by default.
_SCHEDULES: Mapping[str, tuple[Any, ...]] = {
    "constant": ("constant",), "constant_with_warmup": ("constant",), "linear": ("linear",), "cosine": ("cosine",),
    "cosine_with_restarts": ("cosine-restarts", _CYCLES),
    "polynomial": ("polynomial", ("lr_scheduler_power", "schedule.power", float)),
    "cosine_with_min_lr": ("cosine", ("lr_scheduler_min_lr_ratio", "schedule.floor", float)),
}
_OPTIMIZERS: Mapping[str, str] = {
    "adamw": "adamw", "adamw8bit": "adamw-8bit", "pagedadamw8bit": "adamw-8bit-paged", "adafactor": "adafactor",
    "lion": "lion", "prodigy": "prodigy", "adamwschedulefree": "adamw-schedule-free",
}
_SWITCHES: Mapping[str, str] = {"use_bias_correction": "bias_correction", "safeguard_warmup": "safeguard_warmup"}
_ALWAYS = {("decouple", "True"), ("scale_parameter", "False"), ("warmup_init", "False")}  # as it is here


def put_optimizer(config: ToolConfig, training: Training) -> None:
    """Converts the optimizer, its arguments and the learning rate."""
    rates = [rate for name in ("unet_lr", "learning_rate") if (rate := number_of(config.any(name))) is not None]
    training.put("optimizer.lr", next(filter(None, rates), rates[0] if rates else _RATE), "learning_rate")
    kind = str(config.any("optimizer_type") or "AdamW").lower()
    if config.any("use_8bit_adam") or config.any("use_lion_optimizer"):
        kind = "adamw8bit" if config.any("use_8bit_adam") else "lion"
    name = _OPTIMIZERS.get(kind, "adamw")
    if kind not in _OPTIMIZERS:
        training.note("optimizer_type", kind, "no counterpart; adamw is written, and the learning rate may not suit it")
    values: dict[str, tuple[Any, str]] = {}
    for word in arguments(config, "optimizer_args"):
        _argument(word, values, training)
    free = values.pop("relative_step", None) is not None
    if name == "adafactor" and not free:
        training.note("optimizer_type", kind, "sd-scripts' Adafactor finds its own rate unless relative_step is False; "
                      "here optimizer.lr counts")
    warmup = values.pop("warmup_steps", None)
    training.put_optimizer(name, values)
    if warmup is not None:
        training.put("schedule.warmup", int(warmup[0]), warmup[1])


def arguments(config: ToolConfig, name: str) -> list[str]:
    """The arguments NAME=VALUE of a setting: a list, or one text, whose quotes the GUI drops."""
    value = config.any(name)
    return [str(word) for word in value] if isinstance(value, list) else str(value or "").replace('"', "").split()


def _argument(word: str, values: dict[str, tuple[Any, str]], training: Training) -> None:
    """Converts one of optimizer_args: `weight_decay=0.1`, `betas=0.9,0.99`, `use_bias_correction=True`."""
    name, _, text = word.partition("=")
    key, text = f"optimizer_args {name}", re.sub(r"[()\[\]\s]", "", text)
    numbers = [number for number in map(number_of, text.split(",")) if number is not None]
    if name == "betas" and len(numbers) == 2:
        values["betas"] = numbers, key
    elif name in ("weight_decay", "eps", "d_coef", "warmup_steps") and len(numbers) == 1:
        values[name] = numbers[0], key
    elif name in _SWITCHES and text in ("True", "False"):
        values[_SWITCHES[name]] = text == "True", key
    elif name == "relative_step" and text == "False":
        values["relative_step"] = False, key
    elif (name, text) not in _ALWAYS:
        training.note("optimizer_args", word, "no counterpart")


def put_schedule(config: ToolConfig, training: Training) -> None:
    """Converts the schedule of the learning rate, and its warm-up."""
    kind = str(config.any("lr_scheduler") or "constant").lower()
    warmup = _warmup(config)
    for word in arguments(config, "lr_scheduler_args"):
        training.note("lr_scheduler_args", word, "no counterpart")
    if training.settings.get("optimizer.name") == "adamw-schedule-free":  # sd-scripts ignores both
        training.put("schedule.name", "constant", "lr_scheduler")
        return
    name, *own = _SCHEDULES.get(kind, ("cosine",))
    training.put("schedule.name", name, "lr_scheduler")
    if kind not in _SCHEDULES:
        training.note("lr_scheduler", kind, f"no counterpart; {name} is written")
    counts = {key: number_of(config.any(key)) for key in _OF_SCHEDULES}
    if counts["lr_scheduler_num_cycles"] is None:  # the GUI then has one for each of its epochs
        counts["lr_scheduler_num_cycles"] = number_of(config.any("epoch"))
    for key, setting, number in own:
        value = counts[key]
        if value is not None and value == number(value):
            training.put_nearest(setting, number(value), key)
        elif value is not None:
            training.note(key, value, f"{setting} is a whole number; not written")
    _put_warmup(kind, warmup, training)


def _put_warmup(kind: str, warmup: float, training: Training) -> None:
    total = training.settings.get("steps")
    if kind == "constant" and warmup:
        training.note("lr_warmup_steps", warmup, "sd-scripts' constant schedule has no warm-up; not written")
    elif not 0 < warmup < 1:
        training.put("schedule.warmup", round(warmup), "lr_warmup_steps")
    else:
        training.put("schedule.warmup", warmup if total is None else round(warmup * total), "lr_warmup_steps")


def _warmup(config: ToolConfig) -> float:
    """The warm-up in steps, or below 1 as a fraction of the run; the GUI also has one in percent, which yields."""
    steps, percent = config.any("lr_warmup_steps"), number_of(config.any("lr_warmup")) or 0
    if isinstance(steps, str) and steps.strip().endswith("%"):
        return (number_of(steps.strip()[:-1]) or 0) / 100
    return number_of(steps) or percent / 100
