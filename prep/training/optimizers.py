"""What a user sets for each optimizer: the settings that it takes, and their usual values where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

OptimizerName = Literal["adamw", "adamw-8bit", "adamw-8bit-paged", "adamw-schedule-free", "adafactor", "lion", "muon",
                        "prodigy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of an optimizer besides lr and clip, which all have."""

    takes: tuple[str, ...]
    lr: float = 1e-4  # usual
    betas: tuple[float, float] = (0.9, 0.999)  # usual
    first_beta: bool = False  # whether the first of betas must be above 0
    singly: bool = True  # whether a weight's update depends on no other weight


_ADAMW = ("betas", "eps", "weight_decay")
OPTIMIZERS: Mapping[str, Settings] = {
    "adamw": Settings(takes=_ADAMW),
    "adamw-8bit": Settings(takes=_ADAMW),
    "adamw-8bit-paged": Settings(takes=_ADAMW),
    # Its authors advise 1 to 10 times the rate of a schedule.
    "adamw-schedule-free": Settings(takes=_ADAMW, lr=3e-4, first_beta=True, singly=False),
    "adafactor": Settings(takes=("weight_decay",)),
    "lion": Settings(takes=("betas", "weight_decay"), lr=2e-5, betas=(0.9, 0.99)),  # 3 to 10 times less than AdamW's
    "muon": Settings(takes=(*_ADAMW, "momentum")),
    "prodigy": Settings(takes=(*_ADAMW, "d_coef", "bias_correction", "safeguard_warmup"), lr=1.0, first_beta=True,
                        singly=False),
}
DEPENDENT = ("betas", "eps", "weight_decay", "momentum", "d_coef", "bias_correction", "safeguard_warmup")


def usual(name: Any) -> dict[str, Any]:
    """The usual values of settings whose defaults depend on the optimizer; empty if `name` is no optimizer."""
    facts = OPTIMIZERS.get(name) if isinstance(name, str) else None
    return {} if facts is None else {"lr": facts.lr, "betas": facts.betas}
