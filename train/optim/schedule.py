"""The learning rate's factor at a step."""

from __future__ import annotations

import math

from train.config.schema import Schedule


def factor(schedule: Schedule, step: int, total: int) -> float:
    """The factor for `optimizer.lr` in step `step` (from 0) of `total`; in (0, 1].

    Warm-up rises linearly and reaches 1 in its last step. Cosine then falls toward 0, which it would reach at step
    `total` (Loshchilov & Hutter 2017, equation 5, without restarts).
    """
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.name == "constant":
        return 1.0
    progress = (step - schedule.warmup) / max(total - schedule.warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
