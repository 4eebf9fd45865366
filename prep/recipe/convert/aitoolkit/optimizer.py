"""Converts ai-toolkit's optimizer, learning rate and schedule (toolkit/optimizer.py, toolkit/scheduler.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.training import Training, number_of
from prep.training.optimizers import OPTIMIZERS

_RATE, _LEAST = 1e-6, 0.1  # the default; a prodigy's rate below is taken for 1
_EPS = 1e-6  # of all that have one, unless optimizer_params say otherwise
_WARMUP = 1000  # steps of constant_with_warmup
_OPTIMIZERS: Mapping[str, str] = {"adamw": "adamw", "adamw8bit": "adamw-8bit", "lion": "lion",
                                  "adafactor": "adafactor", "prodigy": "prodigy"}
_OF_OPTIMIZER = ("weight_decay", "eps", "d_coef")
_SWITCHES: Mapping[str, str] = {"use_bias_correction": "bias_correction", "safeguard_warmup": "safeguard_warmup"}
_ALWAYS: Mapping[str, Any] = {"decouple": True, "relative_step": False, "scale_parameter": False, "warmup_init": False}
_KEY = "train.optimizer_params"


def put_optimizer(train: ToolConfig, training: Training) -> None:
    """Converts the optimizer with its settings, and the learning rate."""
    named = str(train.any("optimizer") or "adamw").lower()
    name = _OPTIMIZERS.get(named, "prodigy" if named.startswith("prodigy") else "adamw")
    if named not in _OPTIMIZERS:
        training.note("train.optimizer", named, f"no counterpart; {name} is written, and the learning rate may not "
                      "suit it")
    rates = {key: number_of(train.any(key)) for key in ("lr", "unet_lr")}
    rate = next((value for value in rates.values() if value is not None), _RATE)
    if None not in rates.values() and rates["lr"] != rates["unet_lr"]:
        training.note("train.unet_lr", rates["unet_lr"], "ai-toolkit trains with lr, which is written")
    if name == "prodigy" and rate < _LEAST:
        training.note("train.lr", rate, "ai-toolkit takes a rate below 0.1 for 1 with prodigy; 1 is written")
        rate = 1.0
    training.put("optimizer.lr", float(rate), "train.lr")
    clip = number_of(train.any("max_grad_norm"))
    training.put_nearest("optimizer.clip", 1.0 if clip is None else float(clip), "train.max_grad_norm")
    values = _settings(train.any("optimizer_params"), training)
    if "eps" in OPTIMIZERS[name].takes and "eps" not in values:
        values["eps"] = _EPS, "train.optimizer"
    training.put_optimizer(name, values)


def _settings(table: Any, training: Training) -> dict[str, tuple[Any, str]]:
    """The settings of the optimizer; those without a counterpart become notes."""
    values: dict[str, tuple[Any, str]] = {}
    for name, value in table.items() if isinstance(table, dict) else ():
        key, number = f"{_KEY}.{name}", number_of(value)
        numbers = [number_of(each) for each in value] if isinstance(value, list) else []
        if name in _OF_OPTIMIZER and number is not None:
            values[name] = number, key
        elif name == "betas" and len(numbers) == 2 and None not in numbers:
            values["betas"] = numbers, key
        elif name in _SWITCHES and isinstance(value, bool):
            values[_SWITCHES[name]] = value, key
        elif name not in _ALWAYS or value != _ALWAYS[name]:
            training.note(key, value, "no counterpart")
    return values


def put_schedule(train: ToolConfig, training: Training) -> None:
    """Converts the schedule: its cosine falls once, to `eta_min`; its linear one rises unless its parameters say
    otherwise, as torch's LinearLR does."""
    kind, table = str(train.any("lr_scheduler") or "constant"), train.any("lr_scheduler_params")
    table = dict(table) if isinstance(table, dict) else {}
    floor, key = 0.0, "train.lr_scheduler"
    if kind in ("cosine", "cosine_with_restarts"):
        name, least = "cosine", number_of(table.pop("eta_min", None))
        rate = training.settings.get("optimizer.lr")
        floor = round(least / rate, 9) if least and rate else 0.0
    elif kind == "linear":
        start, end = (number_of(table.pop(f"{edge}_factor", None)) for edge in ("start", "end"))
        name, floor = ("linear", end or 0.0) if start == 1 and end is not None and end < 1 else ("constant", 0.0)
        if name == "constant":
            training.note(key, kind, "rises from start_factor to end_factor, a third and the whole rate unless "
                          "lr_scheduler_params say otherwise: no counterpart; constant is written")
    else:
        name = "constant" if kind in ("constant", "constant_with_warmup") else "cosine"
        if name == "cosine":
            training.note(key, kind, "no counterpart; cosine is written")
    training.put("schedule.name", name, key)
    if floor:
        training.put_nearest("schedule.floor", float(floor), key)
    if kind == "constant_with_warmup":
        steps = number_of(table.pop("num_warmup_steps", None))
        training.put("schedule.warmup", _WARMUP if steps is None else int(steps), key)
    for setting, value in table.items():
        if (setting, value) != ("factor", 1.0):
            training.note(f"train.lr_scheduler_params.{setting}", value, "no counterpart")
