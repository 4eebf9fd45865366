"""Balances regularization samples (role "prior"): an epoch shows them as often as training samples, and never more.

The rule of sd-scripts (`DreamBoothDataset`), which repeats its `is_reg` images until they are as many as the training
images. If there are too many, sd-scripts uses the first images with all of their repeats; this module shows every
sample once before it repeats any.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from prep.batching.split import Role
from prep.formatting import counted, grouped

MOST_REPEATS = 1 << 20  # of a sample in a manifest


def balance_prior(samples: Sequence[tuple[Role, int]]) -> list[int]:
    """The repeats of `samples`, pairs of role and repeats; those of "prior" add up to those of "train".

    0: the sample is not shown at all. Without training samples, nothing changes.
    """
    total = sum(repeats for role, repeats in samples if role == "train")
    prior = [repeats for role, repeats in samples if role == "prior"]
    fitted = iter(_fit(prior, total) if total and prior else prior)
    return [next(fitted) if role == "prior" else repeats for role, repeats in samples]


def prior_notes(samples: Sequence[tuple[Role, int]]) -> tuple[str, ...]:
    """Notes to the user on what `balance_prior` changes; empty if it changes nothing."""
    shown = balance_prior(samples)
    prior = [repeats for (role, _), repeats in zip(samples, shown, strict=True) if role == "prior"]
    if shown == [repeats for _, repeats in samples]:
        return ()
    used = sum(map(bool, prior))
    skipped = f"; {len(prior) - used} of {len(prior)} are skipped" if used < len(prior) else ""
    pictures = "the regularization picture is" if used == 1 else f"the {grouped(used)} regularization pictures are"
    return (f"note: {pictures} shown {counted(sum(prior), 'time')} per epoch in total, as often as the training "
            f"pictures{skipped}",)


def _fit(repeats: Sequence[int], total: int) -> list[int]:
    """`repeats` raised or lowered evenly to the sum `total`; the first samples get the remainder."""
    current = sum(repeats)
    if current <= total:
        more, first = divmod(total - current, len(repeats))
        return [min(count + more + (place < first), MOST_REPEATS) for place, count in enumerate(repeats)]
    level = bisect_right(range(max(repeats)), total, key=lambda most: sum(min(count, most) for count in repeats)) - 1
    spare = total - sum(min(count, level) for count in repeats)
    fitted: list[int] = []
    for count in repeats:
        raised = count > level and spare > 0
        spare -= raised
        fitted.append(min(count, level) + raised)
    return fitted
