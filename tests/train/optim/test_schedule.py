"""The learning rate and the moving average against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import optimization
from second_device import playing
from torch import nn
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from prep.training.schema import Schedule
from train.optim import ema
from train.optim.schedule import factor


def test_constant_is_one_after_a_linear_warm_up():
    schedule = Schedule(name="constant", warmup=4)
    assert [factor(schedule, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("total", "steps"), [(100, 5), (39, 1), (10, 0)])
def test_a_fraction_of_the_run_is_its_whole_steps(total, steps):
    """As sd-scripts has it, and in a run in epochs, whose steps nobody knows beforehand."""
    for step in (0, steps, total - 1):
        assert factor(Schedule(name="cosine", warmup=0.05), step, total) == factor(
            Schedule(name="cosine", warmup=steps), step, total)


def test_cosine_falls_from_one_towards_zero():
    schedule = Schedule(name="cosine", warmup=2)
    assert factor(schedule, 2, 10) == 1.0
    assert factor(schedule, 6, 10) == pytest.approx(0.5)
    assert factor(schedule, 9, 10) == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert factor(schedule, 10, 10) == pytest.approx(0.0)
    assert all(factor(Schedule(name="cosine", warmup=5), step, 5) > 0 for step in range(5))


def of_diffusers(name, total, warmup, **own):
    """The factors of diffusers' schedule for `total` steps. Its warm-up begins at 0 and ours above it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = optimization.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total, **own)
    found = []
    for _ in range(total):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("theirs", "own", "ours"), [
    ("linear", {}, {"name": "linear"}), ("cosine", {}, {"name": "cosine"}),
    ("cosine_with_restarts", {"num_cycles": 3}, {"name": "cosine-restarts", "cycles": 3}),
    ("constant_with_warmup", {}, {"name": "constant"}),
    ("polynomial", {"power": 2.0}, {"name": "polynomial", "power": 2.0, "floor": 1e-7}),
    ("polynomial", {"power": 0.5}, {"name": "polynomial", "power": 0.5, "floor": 1e-7}),
], ids=str)
@pytest.mark.parametrize("warmup", [0, 5])
def test_schedules_are_those_of_diffusers(theirs, own, ours, warmup):
    """After the warm-up; a polynomial of diffusers ends at a rate of 1e-7, which here is a floor."""
    schedule = Schedule(warmup=warmup, **ours)
    found = [factor(schedule, step, 40) for step in range(40)]
    assert found[warmup:] == pytest.approx(of_diffusers(theirs, 40, warmup, **own)[warmup:], abs=1e-12)
    assert found[:warmup] == [(step + 1) / 5 for step in range(warmup)]


def test_the_floor_is_that_of_transformers():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 4, 30, min_lr_rate=0.25).lr_lambdas[0]
    schedule = Schedule(name="cosine", warmup=4, floor=0.25)
    assert [factor(schedule, step, 30) for step in range(4, 30)] == pytest.approx([theirs(step)
                                                                                   for step in range(4, 30)])


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine-restarts", "polynomial"])
def test_each_schedule_falls_to_its_floor_and_no_further(name):
    schedule = Schedule(name=name, floor=0.2, cycles=2, power=3.0)
    assert factor(schedule, 0, 10) == 1.0
    assert all(0.2 < factor(schedule, step, 10) <= 1 for step in range(10))
    assert factor(schedule, 10, 10) == factor(schedule, 11, 10) == pytest.approx(0.2)
    assert factor(Schedule(name=name, floor=1.0), 7, 10) == 1.0


def test_restarts_begin_again_at_the_full_rate():
    schedule = Schedule(name="cosine-restarts", cycles=4)
    assert [step for step in range(16) if factor(schedule, step, 16) == 1.0] == [0, 4, 8, 12]


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


def moved(*, in_host):
    """The average after five updates by parameters that change after each."""
    value = {"a": torch.tensor([1.0, -2.0 / 3]), "b": torch.tensor([[0.3]])}
    average = ema.WeightAverage(value, in_host=in_host)
    for step in range(5):
        average.update(value, ema.decay_at(step, 0.9))
        for each in value.values():
            each.mul_(1.5)
    return average


def test_an_average_in_host_memory_is_the_same():
    beside, host = (moved(in_host=in_host).values for in_host in (False, True))
    assert beside.keys() == host.keys() and all(torch.equal(beside[name], host[name]) for name in host)


def test_weights_that_come_later_are_those_of_their_step(monkeypatch):
    """As from a GPU, which goes on meanwhile: they are copied at the update, and waited for at the next, or at a look.
    """
    waited = []

    class Late:
        def __init__(self, *values):
            self.copies = [value.detach().clone() for value in values]

        def wait(self):
            waited.append(self)
            return self.copies

    wanted = moved(in_host=False).values
    monkeypatch.setattr(ema, "Arriving", Late)
    monkeypatch.setattr(ema, "_come_late", lambda values: True)
    found = moved(in_host=True)
    assert len(waited) == 4, "the last one is on its way"
    assert all(torch.equal(found.values[name], value) for name, value in wanted.items()) and len(waited) == 5
    assert found.values and len(waited) == 5


def test_an_average_elsewhere_is_swapped_by_value():
    with playing() as there:
        first, second = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.7])
        value, average = {"a": nn.Parameter(first.to(there))}, {"a": second.clone()}
        with ema.swapped_in(average, value):
            assert value["a"].device == there and torch.equal(value["a"].to("cpu"), second)
            assert average["a"].device.type == "cpu"
        assert torch.equal(value["a"].to("cpu"), first) and torch.equal(average["a"], second)


def test_the_average_of_weights_in_bfloat16_is_float32():
    """Also in host memory, where it stays as it is while the weights have it rounded, and get back their bits."""
    first = torch.tensor([0.1, -3.0]).bfloat16()
    for in_host in (False, True):
        with playing() as there:
            value = {"a": nn.Parameter(first.clone().to(there if in_host else "cpu"))}
            average = ema.WeightAverage(value, in_host=in_host)
            assert average.values["a"].dtype == torch.float32 and torch.equal(average.values["a"], first.float())
            value["a"].data.mul_(2)
            average.update(value, 0.9)
            wanted = first.float().lerp(2 * first.float(), 1 - 0.9)
            assert torch.equal(average.values["a"], wanted)
            with ema.swapped_in(average.values, value):
                assert torch.equal(value["a"].to("cpu"), wanted.bfloat16() if in_host else wanted)
            assert torch.equal(value["a"].to("cpu"), 2 * first) and value["a"].dtype == torch.bfloat16
            assert torch.equal(average.values["a"], wanted)


def test_swapped_in_holds_the_average_meanwhile_and_gives_back_the_bits():
    value, shadow = {"a": torch.tensor([0.1, 0.2])}, {"a": torch.tensor([0.3, 0.7])}
    before, average = value["a"].clone(), shadow["a"].clone()
    with ema.swapped_in(shadow, value):
        assert torch.equal(value["a"], average)
    assert torch.equal(value["a"], before) and torch.equal(shadow["a"], average)
    with ema.swapped_in(None, value):
        assert torch.equal(value["a"], before)
