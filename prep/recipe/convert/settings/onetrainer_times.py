"""Converts when OneTrainer draws sample pictures, saves checkpoints and validates."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.draft import Asked
from prep.recipe.convert.settings.onetrainer_optimizer import in_steps
from prep.recipe.convert.training import Training, number_of

_EVERY: Mapping[str, tuple[float | None, str]] = {  # OneTrainer's defaults; those in minutes have no counterpart
    "sample_after": (None, "MINUTE"), "backup_after": (None, "MINUTE"), "save_every": (None, "NEVER"),
    "validate_after": (1, "EPOCH"),
}
_COUNTED = ("STEP", "EPOCH")


def put_times(asked: Asked, training: Training) -> None:
    """Converts the intervals of sampling, checkpoints and validation: in steps or epochs, or never."""
    _put_every(asked, training, "sample_after", "sample.every")
    if asked.any("validation"):
        _put_every(asked, training, "validate_after", "validation.every")
    else:
        _every(asked, "validate_after")
        training.put("validation.every", 0, "validate_after")
    _checkpoints(asked, training)


def _checkpoints(asked: Asked, training: Training) -> None:
    """Converts the interval of models or else that of backups, since a checkpoint is both, and how many are kept. Of
    two in the same unit the shorter is written."""
    found = {name: _every(asked, name) for name in ("save_every", "backup_after")}
    counted = {name: value for name, (value, unit) in found.items() if unit in _COUNTED and value and value >= 1}
    alike = found["save_every"][1] == found["backup_after"][1]
    written = min(counted, key=lambda name: counted[name] if alike else 0, default="backup_after")
    _put_every(asked, training, written, "checkpoint.every")
    for name, (value, unit) in found.items():
        if name in counted and name != written:
            training.note(name, value, f"a checkpoint is a backup and has the weights; {written} is written")
        elif unit not in (*_COUNTED, "NEVER"):
            _put_every(asked, training, name, "checkpoint.every")
    kept = number_of(asked.any("rolling_backup_count"))
    rolling = asked.any("rolling_backup") and "save_every" not in counted  # only backups are removed
    training.put("checkpoint.keep", 0 if not rolling else 3 if kept is None else int(kept), "rolling_backup_count")


def _every(asked: Asked, name: str) -> tuple[float | None, str]:
    """An interval and its unit."""
    value, unit = _EVERY[name]
    given = asked.any(name)
    return value if given is None else number_of(given), str(asked.any(f"{name}_unit") or unit)


def _put_every(asked: Asked, training: Training, name: str, setting: str) -> None:
    """Adds an interval, or a note on one in minutes."""
    value, unit = _every(asked, name)
    if unit == "NEVER":
        training.put(setting, 0, name)
    elif value is not None and unit == "STEP":
        training.put(setting, in_steps(asked, value), name)
    elif value is not None and unit == "EPOCH":
        training.put_epochs(setting, value, name)
    elif value is not None:
        training.note(name, value, f"counted in {unit}; {setting} is counted in steps or epochs, so it is not written")
