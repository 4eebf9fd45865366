"""With which smaller micro-batches fewer steps are short of samples."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from prep.batching.plan import StepPlan

WORK = 1 << 19  # micro-batches that are planned at most, which takes about 0.15 s


def short_steps(plan: StepPlan) -> int:
    """How many steps of the first epoch have fewer samples than batch_size."""
    return int((plan.sizes(0) < plan.batch_size).sum())


def fewer_short(plan: StepPlan, least: int = 1) -> dict[int, int]:
    """Micro-batches smaller than the plan's, from `least` on, with the number of steps that are short with them: fewer
    than with the plan's, and fewer each time.

    The largest are tried first, until `WORK` is spent: with millions of samples the smallest are left out.
    """
    found: dict[int, int] = {}
    short, work = short_steps(plan), 0
    for size in _divisors(plan.batch_size):
        if not short or size < least:
            break
        if size < plan.micro_batch:
            smaller = replace(plan, micro_batch=size)
            work += sum(smaller.batches)
            if work > WORK:
                break
            if (fewer := short_steps(smaller)) < short:
                found[size] = short = fewer
    return found


def _divisors(number: int) -> list[int]:
    """The divisors of a number, the largest first."""
    small = [each for each in range(1, isqrt(number) + 1) if not number % each]
    return sorted({*small, *(number // each for each in small)}, reverse=True)
