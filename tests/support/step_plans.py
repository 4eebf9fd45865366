"""Step plans, taken apart."""

from __future__ import annotations

from prep.batching.plan import MicroBatch, StepPlan


def micro_batches(plan: StepPlan, epoch: int) -> list[MicroBatch]:
    """All micro-batches of an epoch, step by step."""
    return [batch for number in range(plan.steps_per_epoch) for batch in plan.step(epoch, number)]
