"""The learning rate and the moving average against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from train.config.schema import Schedule
from train.optim import ema
from train.optim.schedule import factor


def test_constant_is_one_after_a_linear_warm_up():
    schedule = Schedule(name="constant", warmup=4)
    assert [factor(schedule, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_from_one_towards_zero():
    schedule = Schedule(name="cosine", warmup=2)
    assert factor(schedule, 2, 10) == 1.0
    assert factor(schedule, 6, 10) == pytest.approx(0.5)
    assert factor(schedule, 9, 10) == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert factor(schedule, 10, 10) == pytest.approx(0.0)
    assert all(factor(Schedule(name="cosine", warmup=5), step, 5) > 0 for step in range(5))


def test_average_follows_its_formula():
    value = {"a": torch.tensor([1.0, 2.0])}
    shadow = ema.start(value)
    expected = value["a"].clone()
    for step in range(5):
        value["a"].mul_(2)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value["a"]
        ema.update(shadow, value, ema.decay_at(step, 0.9))
    assert torch.allclose(shadow["a"], expected)
    assert ema.decay_at(10**6, 0.9) == 0.9


def test_swapped_in_holds_the_average_meanwhile_and_gives_back_the_bits():
    value, shadow = {"a": torch.tensor([0.1, 0.2])}, {"a": torch.tensor([0.3, 0.7])}
    before, average = value["a"].clone(), shadow["a"].clone()
    with ema.swapped_in(shadow, value):
        assert torch.equal(value["a"], average)
    assert torch.equal(value["a"], before) and torch.equal(shadow["a"], average)
    with ema.swapped_in(None, value):
        assert torch.equal(value["a"], before)
