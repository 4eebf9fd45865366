"""Each optimizer: what it keeps is all that it needs to go on bit by bit, and its steps are those of its paper."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import pytest
import torch
from torch import nn

from prep.errors import ConfigError
from prep.training import optimizers as settings
from prep.training.schema import Optimizer
from train.config.load import parse
from train.optim import optimizer_state
from train.optim.optimizers import TABLE, average, state_bytes

SHAPES = ((70, 80), (8,), (4, 3, 3, 3), (5, 6), (2,))  # the last one never has a gradient
NAMES = [name for name in TABLE if not TABLE[name].device and (TABLE[name].torch < (2, 9) or hasattr(torch.optim,
                                                                                                    "Muon"))]


def fresh(name, shapes=SHAPES, on_gpu=False, **more):
    """Parameters, of which one begins with zeros as lora_B does, and their optimizer."""
    drawn = torch.Generator().manual_seed(1)
    parameters = {f"p{at}": nn.Parameter(torch.zeros(shape) if at == 3 else torch.randn(shape, generator=drawn))
                  for at, shape in enumerate(shapes)}
    given = Optimizer(name=name, **{**settings.usual(name), **more})
    return parameters, TABLE[name].build([{"params": list(parameters.values()), "rate": None}], given, on_gpu)


def steps(parameters, optimizer, numbers):
    """Gradients that depend on the weights and on the step, as in training."""
    for number in numbers:
        drawn = torch.Generator().manual_seed(number)
        for name, value in parameters.items():
            noise = torch.randn(value.shape, generator=drawn)
            value.grad = None if name == "p4" else value.detach() + noise
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def copied(values):
    return {name: value.detach().clone() for name, value in values.items()}


def test_both_tables_have_every_optimizer():
    assert set(TABLE) == set(settings.OPTIMIZERS) == set(get_args(settings.OptimizerName))
    assert {name for each in settings.OPTIMIZERS.values() for name in each.takes} == set(settings.DEPENDENT)


def with_betas():
    """Each optimizer with betas of its own, and with each of them 0, where the settings allow that."""
    for name in NAMES:
        yield name, {}
        for betas in ((0.0, 0.99), (0.9, 0.0), (0.0, 0.0)) if "betas" in settings.OPTIMIZERS[name].takes else ():
            with suppress(ConfigError):
                parse({"optimizer": {"name": name, "betas": list(betas)}}, "")
                yield name, {"betas": betas}


@pytest.mark.parametrize(("name", "more"), list(with_betas()), ids=str)
def test_what_is_kept_goes_on_bit_by_bit(name, more):
    spec = TABLE[name]
    parameters, optimizer = fresh(name, **more)
    steps(parameters, optimizer, range(3))
    weights, state = copied(parameters), copied(optimizer_state.tensors_of(spec, optimizer, parameters))
    steps(parameters, optimizer, range(3, 6))

    again, other = fresh(name, **more)
    wanted = optimizer_state.expected(spec, other, again, set(state))
    assert wanted == {each: (value.dtype, tuple(value.shape)) for each, value in state.items()}
    for each, value in again.items():
        value.data.copy_(weights[each])
    optimizer_state.put(spec, other, again, state)
    found = optimizer_state.tensors_of(spec, other, again)
    assert all(torch.equal(value, state[each]) for each, value in found.items())
    steps(again, other, range(3, 6))
    assert all(torch.equal(value, again[each]) for each, value in parameters.items())
    ends = [optimizer_state.tensors_of(spec, each, values)
            for each, values in ((optimizer, parameters), (other, again))]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(value, ends[1][each])
                                                    for each, value in ends[0].items())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_changes_in_an_optimizer(name):
    """A step of a copy that has only what is kept would differ if a library began to keep more."""
    parameters, optimizer = fresh(name)
    before = [{kind: value for kind, value in group.items() if kind != "params"} for group in optimizer.param_groups]
    steps(parameters, optimizer, range(2))
    derived = {"d_denom", "d_hat", "scheduled_lr"}  # computed by each step before it is used
    for group, old in zip(optimizer.param_groups, before, strict=True):
        changed = {kind for kind, value in group.items() if kind != "params" and old.get(kind, "none") != value}
        assert changed <= set(TABLE[name].numbers) | derived
    for value in parameters.values():
        there = set(optimizer.state.get(value, {}))
        assert there - {"RMS", "qmap1", "qmap2"} == (set(TABLE[name].state(tuple(value.shape))) if there else set())


@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_of_its_state_is_exact(name):
    parameters, optimizer = fresh(name, SHAPES[:4])
    steps(parameters, optimizer, range(1))
    state = optimizer_state.tensors_of(TABLE[name], optimizer, parameters)
    found = sum(value.numel() * value.element_size() for each, value in state.items() if "/group-" not in each)
    assert state_bytes(TABLE[name], SHAPES[:4]) == found


@pytest.mark.parametrize("name", NAMES)
def test_each_finds_the_least_of_a_parabola(name):
    goal = torch.randn(64, 80, generator=torch.Generator().manual_seed(5))
    parameters, optimizer = fresh(name, ((64, 80), (8,)), lr=1.0 if name == "prodigy" else 0.02)
    begun = float((parameters["p0"] - goal).square().mean().detach())
    for _ in range(300):
        (parameters["p0"] - goal).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found = average(optimizer, parameters)["p0"] if TABLE[name].averages else parameters["p0"].detach()
    assert float((found - goal).square().mean()) < 0.25 * begun


def one_step(name, **more):
    """A matrix, its gradient, and the matrix after a step, all float64."""
    parameters, optimizer = fresh(name, ((70, 80),), **more)
    weight, value = parameters["p0"].detach().double(), parameters["p0"]
    value.grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(9))
    gradient = value.grad.double()
    optimizer.step()
    return weight, gradient, value.detach().double()


@pytest.mark.parametrize("name", ["adamw", "adamw-schedule-free", "adamw-8bit"])
def test_the_first_step_of_adamw(name):
    """The moments are corrected to the gradient and its square: a step is lr · sign(g), and the decay."""
    weight, gradient, found = one_step(name, lr=0.01, weight_decay=0.1)
    wanted = weight - 0.01 * (gradient.sign() + 0.1 * weight)
    assert torch.allclose(found, wanted, atol=1e-4 if name == "adamw-8bit" else 1e-6)


def test_the_first_step_of_lion():
    weight, gradient, found = one_step("lion", lr=0.01, weight_decay=0.1)
    assert torch.allclose(found, weight * (1 - 0.01 * 0.1) - 0.01 * gradient.sign(), atol=1e-6)


def test_the_first_step_of_adafactor():
    """Rows and columns of g² give its estimate (Algorithm 4); the update's root mean square is at most 1."""
    weight, gradient, found = one_step("adafactor", lr=0.01, weight_decay=0.0)
    square = gradient.square()
    estimate = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
    update = gradient / estimate.sqrt()
    update = update / max(1.0, float(update.square().mean().sqrt()))
    assert torch.allclose(found, weight - 0.01 * update, atol=1e-5)


@pytest.mark.skipif("muon" not in NAMES, reason="this torch has no Muon")
def test_the_first_step_of_muon():
    """The update has the gradient's singular vectors, values near 1, and the size of an update of AdamW."""
    weight, gradient, found = one_step("muon", lr=0.01, weight_decay=0.1)
    update = (weight * (1 - 0.01 * 0.1) - found) / 0.01
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    inside = left.T @ update @ right.T / (0.2 * 80**0.5)
    assert float(inside.diagonal().min()) > 0.5 and float(inside.diagonal().max()) < 1.5
    assert float((inside - inside.diagonal().diag()).abs().max()) < 0.2
    assert 0.1 < float(update.square().mean().sqrt()) < 0.3


def test_prodigy_takes_its_rate_from_the_way_it_came():
    """d grows from 1e-6 to about the distance; d_coef scales it."""
    found = []
    for factor in (1.0, 2.0):
        parameters, optimizer = fresh("prodigy", ((70, 80),), d_coef=factor, weight_decay=0.0)
        for _ in range(60):
            parameters["p0"].grad = parameters["p0"].detach() - 3
            optimizer.step()
        found.append(optimizer.param_groups[0]["d"])
    assert found[0] > 1e-3 and found[1] > found[0]


def test_prodigy_is_built_without_a_word(capsys):
    _, optimizer = fresh("prodigy", weight_decay=0.1)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1 and capsys.readouterr() == ("", "")


def test_the_average_of_a_schedule_free_optimizer_is_that_of_its_z():
    """x is the mean of z weighted by the squared rate (Defazio et al. 2024, equation 5); reading it changes no bit."""
    parameters, optimizer = fresh("adamw-schedule-free", ((70, 80),), lr=0.01)
    assert torch.equal(average(optimizer, parameters)["p0"], parameters["p0"])
    x, sums = parameters["p0"].detach().double(), 0.0
    for step in range(8):
        rate = 0.01 * min(1.0, (step + 1) / 4)  # a warm-up
        optimizer.param_groups[0]["lr"] = rate
        parameters["p0"].grad = torch.randn(70, 80, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        sums += rate**2
        x = x + rate**2 / sums * (optimizer.state[parameters["p0"]]["z"].double() - x)
        before = parameters["p0"].detach().clone()
        assert torch.allclose(average(optimizer, parameters)["p0"].double(), x, atol=1e-5)
        assert torch.equal(parameters["p0"], before)
    assert not torch.allclose(parameters["p0"].double(), x, atol=1e-3)


def test_a_fused_optimizer_counts_on_its_device():
    parameters, optimizer = fresh("adamw", on_gpu=True)
    steps(parameters, optimizer, range(2))
    state = optimizer_state.tensors_of(TABLE["adamw"], optimizer, parameters)
    again, other = fresh("adamw", on_gpu=True)
    for name, value in again.items():
        value.data.copy_(parameters[name].detach())
    optimizer_state.put(TABLE["adamw"], other, again, copied(state))
    for each, values in ((optimizer, parameters), (other, again)):
        steps(values, each, range(2, 4))
    assert all(torch.equal(value, again[name]) for name, value in parameters.items())
