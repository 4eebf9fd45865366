"""Converts when OneTrainer draws sample pictures, saves checkpoints and validates."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.onetrainer.optimizer import in_steps
from prep.recipe.convert.training import Training, number_of

_EVERY: Mapping[str, tuple[float | None, str]] = {  # OneTrainer's defaults; those in minutes have no counterpart
    "sample_after": (None, "MINUTE"), "backup_after": (None, "MINUTE"), "save_every": (None, "NEVER"),
    "validate_after": (1, "EPOCH"),
}
_COUNTED = ("STEP", "EPOCH")


def put_times(config: ToolConfig, training: Training) -> None:
    """Converts the intervals of sampling, checkpoints and validation: in steps or epochs, or never."""
    _put_every(config, training, "sample_after", "sample.every")
    if config.any("validation"):
        _put_every(config, training, "validate_after", "validation.every")
    else:
        _every(config, "validate_after")
        training.put("validation.every", 0, "validate_after")
    _checkpoints(config, training)


def _checkpoints(config: ToolConfig, training: Training) -> None:
    """Converts the interval of models or else that of backups, since a checkpoint is both, and how many are kept. If
    both have the same unit, the shorter interval is written."""
    intervals = {name: _every(config, name) for name in ("save_every", "backup_after")}
    counted = {name: value for name, (value, unit) in intervals.items() if unit in _COUNTED and value and value >= 1}
    alike = intervals["save_every"][1] == intervals["backup_after"][1]
    written = min(counted, key=lambda name: counted[name] if alike else 0, default="backup_after")
    _put_every(config, training, written, "checkpoint.every")
    for name, (value, unit) in intervals.items():
        if name in counted and name != written:
            training.note(name, value, f"a checkpoint is a backup and has the weights; {written} is written")
        elif unit not in (*_COUNTED, "NEVER"):
            _put_every(config, training, name, "checkpoint.every")
    count = number_of(config.any("rolling_backup_count"))
    rolling = config.any("rolling_backup") and "save_every" not in counted  # only backups are removed
    training.put("checkpoint.keep", 0 if not rolling else 3 if count is None else int(count), "rolling_backup_count")


def _every(config: ToolConfig, name: str) -> tuple[float | None, str]:
    """An interval and its unit."""
    value, unit = _EVERY[name]
    interval = config.any(name)
    return value if interval is None else number_of(interval), str(config.any(f"{name}_unit") or unit)


def _put_every(config: ToolConfig, training: Training, name: str, setting: str) -> None:
    """Adds an interval, or a note on one in minutes."""
    value, unit = _every(config, name)
    if unit == "NEVER":
        training.put(setting, 0, name)
    elif value is not None and unit == "STEP":
        training.put(setting, in_steps(config, value), name)
    elif value is not None and unit == "EPOCH":
        training.put_epochs(setting, value, name)
    elif value is not None:
        training.note(name, value, f"counted in {unit}; {setting} is counted in steps or epochs, so it is not written")
