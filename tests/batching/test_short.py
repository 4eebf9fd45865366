"""Which smaller micro-batch leaves fewer steps short, by the plan that trains."""

from __future__ import annotations

import pytest

from prep.batching import short as module
from prep.batching.plan import step_plan
from prep.batching.short import fewer_short, short_steps


def plan(counts, batch_size, micro_batch, **more):
    return step_plan(counts, seed=3, batch_size=batch_size, micro_batch=micro_batch, **more)


@pytest.mark.parametrize(("counts", "batch", "micro"), [
    ((45,), 8, 8), ((20, 17, 11), 8, 8), ((20, 17, 11), 12, 6), ((7, 9, 13, 3), 16, 8)])
def test_each_is_better_than_the_one_before_and_as_planned(counts, batch, micro):
    given = plan(counts, batch, micro)
    found = fewer_short(given)
    fewest = short_steps(given)
    for size in range(micro - 1, 0, -1):
        if batch % size == 0:
            sizes = [sum(len(each.occurrences) for each in plan(counts, batch, size).step(0, number))
                     for number in range(plan(counts, batch, size).steps_per_epoch)]
            short = sum(each < batch for each in sizes)
            assert found.get(size) == (short if short < fewest else None)
            fewest = min(fewest, short)
    assert list(found) == sorted(found, reverse=True)


def test_nothing_is_better_than_full_steps_and_than_what_is_left_over():
    assert fewer_short(plan((16, 8), 8, 8)) == {}
    assert fewer_short(plan((9,), 2, 2)) == {}, "an odd sample is left with micro-batches of 1, too"
    full = plan((9, 7), 8, 4, underfill="repeat")
    assert short_steps(full) == 0 and fewer_short(full) == {}


def test_no_smaller_than_there_are_ranks():
    given = plan((20, 17, 11), 8, 8)
    assert min(fewer_short(given)) == 1 and min(fewer_short(given, least=2)) == 2


def test_its_work_has_a_bound(monkeypatch):
    given = plan((20, 17, 11), 8, 8)
    monkeypatch.setattr(module, "WORK", 14)  # 13 micro-batches of 4, 25 of 2
    assert set(fewer_short(given)) <= {4}
    monkeypatch.setattr(module, "WORK", 12)
    assert fewer_short(given) == {}
