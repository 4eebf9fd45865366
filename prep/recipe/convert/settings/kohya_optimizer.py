"""Converts sd-scripts' optimizer with its arguments, learning rate and schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prep.recipe.convert.draft import Asked
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


def put_optimizer(asked: Asked, training: Training) -> None:
    """Converts the optimizer, its arguments and the learning rate."""
    rates = [one for one in (number_of(asked.any(name)) for name in ("unet_lr", "learning_rate")) if one is not None]
    training.put("optimizer.lr", next(filter(None, rates), rates[0] if rates else _RATE), "learning_rate")
    kind = str(asked.any("optimizer_type") or "AdamW").lower()
    if asked.any("use_8bit_adam") or asked.any("use_lion_optimizer"):
        kind = "adamw8bit" if asked.any("use_8bit_adam") else "lion"
    name = _OPTIMIZERS.get(kind, "adamw")
    if kind not in _OPTIMIZERS:
        training.note("optimizer_type", kind, "no counterpart; adamw is written, and the learning rate may not suit it")
    given: dict[str, tuple[Any, str]] = {}
    for word in arguments(asked, "optimizer_args"):
        _argument(word, given, training)
    free = given.pop("relative_step", None) is not None
    if name == "adafactor" and not free:
        training.note("optimizer_type", kind, "sd-scripts' Adafactor finds its own rate unless relative_step is False; "
                      "here optimizer.lr counts")
    warmup = given.pop("warmup_steps", None)
    training.put_optimizer(name, given)
    if warmup is not None:
        training.put("schedule.warmup", int(warmup[0]), warmup[1])


def arguments(asked: Asked, name: str) -> list[str]:
    """The arguments NAME=VALUE of a setting: a list, or one text, of which the GUI drops the quotes."""
    given = asked.any(name)
    return [str(word) for word in given] if isinstance(given, list) else str(given or "").replace('"', "").split()


def _argument(word: str, given: dict[str, tuple[Any, str]], training: Training) -> None:
    """Converts one of optimizer_args: `weight_decay=0.1`, `betas=0.9,0.99`, `use_bias_correction=True`."""
    name, _, text = word.partition("=")
    key, text = f"optimizer_args {name}", re.sub(r"[()\[\]\s]", "", text)
    numbers = [one for one in map(number_of, text.split(",")) if one is not None]
    if name == "betas" and len(numbers) == 2:
        given["betas"] = numbers, key
    elif name in ("weight_decay", "eps", "d_coef", "warmup_steps") and len(numbers) == 1:
        given[name] = numbers[0], key
    elif name in _SWITCHES and text in ("True", "False"):
        given[_SWITCHES[name]] = text == "True", key
    elif name == "relative_step" and text == "False":
        given["relative_step"] = False, key
    elif (name, text) not in _ALWAYS:
        training.note("optimizer_args", word, "no counterpart")


def put_schedule(asked: Asked, training: Training) -> None:
    """Converts the schedule of the learning rate, and its warm-up."""
    kind = str(asked.any("lr_scheduler") or "constant").lower()
    warmup = _warmup(asked)
    for word in arguments(asked, "lr_scheduler_args"):
        training.note("lr_scheduler_args", word, "no counterpart")
    if training.settings.get("optimizer.name") == "adamw-schedule-free":  # sd-scripts ignores both
        training.put("schedule.name", "constant", "lr_scheduler")
        return
    name, *own = _SCHEDULES.get(kind, ("cosine",))
    training.put("schedule.name", name, "lr_scheduler")
    if kind not in _SCHEDULES:
        training.note("lr_scheduler", kind, f"no counterpart; {name} is written")
    there = {key: number_of(asked.any(key)) for key in _OF_SCHEDULES}
    if there["lr_scheduler_num_cycles"] is None:  # the GUI then has one for each of its epochs
        there["lr_scheduler_num_cycles"] = number_of(asked.any("epoch"))
    for key, setting, number in own:
        value = there[key]
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


def _warmup(asked: Asked) -> float:
    """The warm-up in steps, or below 1 as a fraction of the run; the GUI also has one in percent, which yields."""
    steps, percent = asked.any("lr_warmup_steps"), number_of(asked.any("lr_warmup")) or 0
    if isinstance(steps, str) and steps.strip().endswith("%"):
        return (number_of(steps.strip()[:-1]) or 0) / 100
    return number_of(steps) or percent / 100
