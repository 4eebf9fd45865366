"""Converts OneTrainer's batches, optimizer, learning rate and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from typing import Any

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.onetrainer.family import denoiser_of, part_of
from prep.recipe.convert.training import Training, number_of

_OPTIMIZERS: Mapping[str, str] = {
    "ADAMW": "adamw", "ADAMW_8BIT": "adamw-8bit", "ADAFACTOR": "adafactor", "LION": "lion", "PRODIGY": "prodigy",
    "SCHEDULE_FREE_ADAMW": "adamw-schedule-free",
}
_OF_OPTIMIZER: Mapping[str, str] = {"weight_decay": "weight_decay", "eps": "eps", "d_coef": "d_coef",
                                    "use_bias_correction": "bias_correction", "safeguard_warmup": "safeguard_warmup"}
_SWITCHES = ("bias_correction", "safeguard_warmup")
_SCHEDULES: Mapping[str, str] = {"CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine",
                                 "COSINE_WITH_HARD_RESTARTS": "cosine-restarts"}


def put_batches(config: ToolConfig, training: Training) -> None:
    """Converts the size of a batch, and the epochs."""
    count = int(number_of(config.any("batch_size")) or 1)
    more = int(number_of(config.any("gradient_accumulation_steps")) or 1)
    training.put("batch_size", count * more, "batch_size")
    if more > 1 and "batch_size" in training.settings:
        training.put("micro_batch", count, "batch_size")
    training.put("epochs", int(number_of(config.any("epochs")) or 100), "epochs")


def batch_of(config: ToolConfig) -> int:
    """The samples of an optimizer step."""
    counts = (int(number_of(config.any(name)) or 1) for name in ("batch_size", "gradient_accumulation_steps"))
    return max(1, prod(counts))


def in_steps(config: ToolConfig, value: float) -> int:
    """`value` batches as optimizer steps; at least 1, unless there are none. OneTrainer drops parts of a batch."""
    value = int(value)
    return max(1, round(value / max(1, int(number_of(config.any("gradient_accumulation_steps")) or 1)))) if value else 0


def put_optimizer(config: ToolConfig, training: Training) -> None:
    """Converts the optimizer with its settings, and the learning rate."""
    own = config.any("optimizer")
    table = own if isinstance(own, dict) else {"optimizer": own or "ADAMW"}
    rate = number_of(part_of(config, denoiser_of(config)).get("learning_rate"))
    rate = number_of(config.any("learning_rate")) if rate is None else rate
    training.put("optimizer.lr", (3e-6 if rate is None else rate) * _scale(config, training), "learning_rate")
    clip = number_of(config.any("clip_grad_norm"))
    table_of = config.layers[0].table  # null, or infinity, which it writes as a text: no clipping
    off = "clip_grad_norm" in table_of and table_of["clip_grad_norm"] in (None, "inf")
    training.put("optimizer.clip", 0.0 if off else 1.0 if clip is None else clip, "clip_grad_norm")
    kind = str(table.get("optimizer") or "ADAMW")
    if kind not in _OPTIMIZERS:
        training.note("optimizer.optimizer", kind, "no counterpart; adamw is written, and the learning rate may not "
                      "suit it")
        training.put("optimizer.name", "adamw", "optimizer.optimizer")
        return
    values: dict[str, tuple[Any, str]] = {}
    for name, setting in _OF_OPTIMIZER.items():
        value = table.get(name)
        if isinstance(value, bool) if setting in _SWITCHES else number_of(value) is not None:
            values[setting] = value if setting in _SWITCHES else number_of(value), f"optimizer.{name}"
    betas = [number_of(table.get(name)) for name in ("beta1", "beta2")]
    if None not in betas:
        values["betas"] = betas, "optimizer.beta1"
    paged = "-paged" if kind == "ADAMW_8BIT" and table.get("is_paged") is True else ""
    if kind == "ADAFACTOR":
        values = {name: value for name, value in values.items() if name == "weight_decay"}
    if kind == "ADAFACTOR" and (table.get("relative_step") is not False or table.get("scale_parameter") is not False):
        training.note("optimizer.optimizer", kind, "OneTrainer's Adafactor finds its own rate unless relative_step and "
                      "scale_parameter are false; here optimizer.lr counts")
    training.put_optimizer(_OPTIMIZERS[kind] + paged, values)
    if kind == "SCHEDULE_FREE_ADAMW" and "weight_decay" not in values:
        training.put("optimizer.weight_decay", 0.01, "optimizer.weight_decay")  # OneTrainer's own default


def put_full(config: ToolConfig, training: Training) -> None:
    """Converts weights in bfloat16 with stochastic rounding, and updates in the backward pass, of full fine-tuning."""
    own = config.any("optimizer")
    table = own if isinstance(own, dict) else {}
    dtypes = (part_of(config, denoiser_of(config)).get("weight_dtype"), config.any("weight_dtype"))
    half = next((str(each) for each in dtypes if each not in (None, "NONE")), "") == "BFLOAT_16"
    if training.settings.get("method") == "full":
        training.put_full(
            half="optimizer.stochastic_rounding" if half and table.get("stochastic_rounding") is True else "",
            fused="optimizer.fused_back_pass" if table.get("fused_back_pass") is True else "")


def _scale(config: ToolConfig, training: Training) -> float:
    """The factor of the learning rate: the square root of a batch's samples, of the batches in a step, or of both."""
    kind = str(config.any("learning_rate_scaler") or "NONE")
    counts = [number_of(config.any(name)) or 1 for name in ("batch_size", "gradient_accumulation_steps")]
    scales = {"BATCH": counts[:1], "GRADIENT_ACCUMULATION": counts[1:], "BOTH": counts}
    factor = sqrt(max(1, prod(scales.get(kind.removeprefix("GLOBAL_"), []))))
    if factor != 1:
        training.note("learning_rate_scaler", kind, f"the learning rate is written times {factor:.4g}, as OneTrainer "
                      "scales it for one device")
    return factor


def put_schedule(config: ToolConfig, training: Training) -> None:
    """Converts the schedule of the learning rate, and its warm-up."""
    kind = str(config.any("learning_rate_scheduler") or "CONSTANT")
    if training.settings.get("optimizer.name") == "adamw-schedule-free":
        kind = "CONSTANT"  # as in OneTrainer
    training.put("schedule.name", _SCHEDULES.get(kind, "cosine"), "learning_rate_scheduler")
    if kind not in _SCHEDULES:
        training.note("learning_rate_scheduler", kind, "no counterpart; cosine is written")
    floor, cycles = (number_of(config.any(f"learning_rate_{name}")) for name in ("min_factor", "cycles"))
    if floor:
        training.put("schedule.floor", floor, "learning_rate_min_factor")
    if kind == "COSINE_WITH_HARD_RESTARTS" and cycles is not None and cycles == int(cycles):
        training.put("schedule.cycles", int(cycles), "learning_rate_cycles")
    elif kind == "COSINE_WITH_HARD_RESTARTS" and cycles is not None:
        training.note("learning_rate_cycles", cycles, "schedule.cycles is a whole number; not written")
    warmup = number_of(config.any("learning_rate_warmup_steps"))
    warmup = 200 if warmup is None else warmup
    if 0 < warmup < 1:
        training.put("schedule.warmup", warmup, "learning_rate_warmup_steps")
    elif warmup == 1:
        training.note("learning_rate_warmup_steps", warmup, "the whole run, so that the rate never falls; not written")
    elif warmup > 0 and training.settings.get("optimizer.name") == "adamw-schedule-free":
        training.put("schedule.warmup", int(warmup), "learning_rate_warmup_steps")  # which counts its own steps
    elif warmup > 0:
        training.put("schedule.warmup", in_steps(config, warmup), "learning_rate_warmup_steps")
