"""Smaller micro-batches, and with which of them fewer steps are short of samples."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from prep.batching.plan import StepPlan

WORK = 1 << 19  # micro-batches that are planned at most, which takes about 0.15 s


def short_steps(plan: StepPlan) -> int:
    """The number of steps of the first epoch with fewer samples than batch_size."""
    return int((plan.sizes(0) < plan.batch_size).sum())


def fewer_short(plan: StepPlan, least: int = 1) -> dict[int, int]:
    """Micro-batches smaller than the plan's, from `least` on, with the number of steps that are short with them: fewer
    than with the plan's, and fewer each time.

    The largest are tried first, until `WORK` is spent: with millions of samples the smallest are left out.
    """
    shortages: dict[int, int] = {}
    short, work = short_steps(plan), 0
    for size in smaller_sizes(plan.batch_size, plan.micro_batch):
        if not short or size < least:
            break
        smaller = replace(plan, micro_batch=size)
        work += sum(smaller.batches)
        if work > WORK:
            break
        if (fewer := short_steps(smaller)) < short:
            shortages[size] = short = fewer
    return shortages


def smaller_sizes(batch_size: int, micro_batch: int) -> list[int]:
    """The micro-batches below `micro_batch` that a plan may have, which divide its batch_size, the largest first."""
    small = [each for each in range(1, isqrt(batch_size) + 1) if not batch_size % each]
    divisors = {*small, *(batch_size // each for each in small)}
    return sorted((size for size in divisors if size < micro_batch), reverse=True)
