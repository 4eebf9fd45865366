"""The learning rate's factor at a step."""

from __future__ import annotations

import math

from prep.training.schema import Schedule


def factor(schedule: Schedule, step: int, total: int) -> float:
    """The factor for `optimizer.lr` in step `step` (from 0) of `total`; in [0, 1].

    Warm-up rises linearly and reaches 1 in its last step. Then all but constant fall toward `floor`, which they would
    reach at step `total`: floor + (1 - floor) · fall(progress).
    """
    warmup = warmup_steps(schedule, total)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return schedule.floor + (1 - schedule.floor) * _fall(schedule, progress)


def warmup_steps(schedule: Schedule, total: int) -> int:
    """The steps of warm-up in a run of `total` steps; of a fraction the whole ones, as sd-scripts has it."""
    return schedule.warmup if isinstance(schedule.warmup, int) else int(schedule.warmup * total)


def _fall(schedule: Schedule, progress: float) -> float:
    """The fall from 1 to 0 as progress p goes from 0 to 1, by name:

        linear            1 - p
        polynomial        (1 - p)^power
        cosine            (1 + cos(pi · p)) / 2
        cosine-restarts   the same of p · cycles, without its whole part

    The first two are `get_linear_schedule_with_warmup` and `get_polynomial_decay_schedule_with_warmup` of
    diffusers.optimization. Cosine: Loshchilov & Hutter 2017, equation 5, with restarts of equal length.
    """
    if schedule.name == "linear":
        return 1 - progress
    if schedule.name == "polynomial":
        return float((1 - progress) ** schedule.power)
    if schedule.name == "cosine-restarts" and progress < 1:
        progress = progress * schedule.cycles % 1.0
    return 0.5 * (1 + math.cos(math.pi * progress))
