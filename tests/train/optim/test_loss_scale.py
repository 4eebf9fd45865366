"""The scale of the loss: as torch.amp.GradScaler moves it, and whole runs in float16."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from runs import events, go
from safetensors.torch import load_file

from prep.errors import ConfigError
from prep.fs.place import Local
from train import loop
from train.optim import loss_scale
from train.optim.loss_scale import LossScale
from train.runs.checkpoint import find_checkpoint

HALF = {"precision": "fp16", "validation": {"every": 0}, "sample": {"every": 0}, "batch_size": 4, "micro_batch": 2,
        "steps": 8, "lora": {"rank": 4}}


def test_it_moves_like_that_of_torch(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 3)
    parameter = torch.nn.Parameter(torch.zeros(2))
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    optimizer, ours = torch.optim.SGD([parameter], lr=0.0), LossScale()
    for bad in [False, False, True, False, False, False, False, True, True, *[False] * 9]:
        theirs.scale(parameter.sum() * (math.inf if bad else 1.0)).backward()
        assert theirs.get_scale() == ours.value
        mine = parameter.grad.clone()
        ours.undo([mine])
        norm = float(mine.norm())
        assert ours.overflowed(1.0, norm) == bad
        (ours.halve if bad else ours.grow)()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()


def test_undoing_it_is_exact_and_it_has_limits():
    values = torch.randn(100)
    scale, scaled = LossScale(), values * loss_scale.FIRST
    scale.undo([scaled])
    assert torch.equal(scaled, values)
    for _ in range(100):
        scale.halve()
    assert scale.value == loss_scale.LEAST and not scale.overflowed(1.0, math.inf)
    assert not LossScale().overflowed(math.nan, math.inf)
    scale.steps, scale.value = loss_scale.GROWS_AFTER - 1, loss_scale.MOST
    scale.grow()
    assert (scale.value, scale.steps) == (loss_scale.MOST, 0)
    again = LossScale()
    scale.value, scale.steps = 0.5**3, 17
    again.put(scale.tensors())
    assert (again.value, again.steps) == (0.125, 17)


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_float16_learns_what_float32_does(make, setup_of, tmp_path, method):
    made, losses = make(), {}
    for precision in ("fp16", "fp32"):
        go(setup_of(made, **{**HALF, "precision": precision, "method": method}), tmp_path / precision)
        losses[precision] = [event["loss"] for event in events(tmp_path / precision) if event["event"] == "step"]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=5e-3) and losses["fp16"] != losses["fp32"]
    steps = [event for event in events(tmp_path / "fp16") if event["event"] == "step"]
    assert {(step["loss_scale"], step["skipped"]) for step in steps} == {(2.0**16, False)}
    assert all("loss_scale" not in event for event in events(tmp_path / "fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"ema": {"decay": 0.5}}, {"optimizer": {"name": "adamw-schedule-free"}},
                                      {"optimizer": {"name": "prodigy"}, "ema": {"decay": 0.5}}], ids=str)
def test_a_step_that_overflows_changes_only_the_scale_and_a_resumed_run_does_the_same(
        make, setup_of, tmp_path, monkeypatch, settings):
    """With a scale so large that the gradients of the first steps overflow."""
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 2)
    monkeypatch.setattr(loss_scale.LossScale.__init__, "__defaults__", (2.0**40, 0))
    monkeypatch.setattr(loss_scale, "MOST", 2.0**40)
    setup = setup_of(make(), **{**HALF, "steps": 40, "checkpoint": {"every": 3, "keep": 0}, **settings})
    go(setup, tmp_path / "straight")
    steps = [event for event in events(tmp_path / "straight") if event["event"] == "step"]
    skipped = [step["step"] for step in steps if step["skipped"]]
    assert skipped[:3] == [1, 2, 3] and skipped[-1] > 20 and len(skipped) < 39
    for before, after in pairwise(steps):
        assert not before["skipped"] or after["loss_scale"] == pytest.approx(before["loss_scale"] / 2, rel=1e-5)
    assert all((step["grad_norm"] is None) == step["skipped"] for step in steps)
    for name in ("lora", "ema"):
        first = load_file(tmp_path / "straight" / "checkpoints" / "step-000003" / f"{name}.safetensors")
        assert all(not value.any() for key, value in first.items() if "lora_up" in key)
    held = load_file(tmp_path / "straight" / "checkpoints" / "step-000003" / "optimizer.safetensors")
    assert all("/group-" in name for name in held), "an optimizer that never made a step has no moments"
    for stop in (3, max(skipped)):
        run = tmp_path / f"broken-{stop}"

        def watch(event, stop=stop):
            if event["event"] == "step" and event["step"] == stop:
                raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            go(setup, run, watch=watch)
        assert find_checkpoint(Local(run), None).name == f"step-{stop:06d}"
        go(setup, run, resume=True)
        for path in (run / "checkpoints" / "step-000040").glob("*.safetensors"):
            other = tmp_path / "straight" / "checkpoints" / "step-000040" / path.name
            assert path.read_bytes() == other.read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "prodigy", "adamw-schedule-free"])
def test_a_run_that_overflowed_in_every_step_is_resumed(make, setup_of, tmp_path, monkeypatch, name):
    monkeypatch.setattr(loss_scale.LossScale.__init__, "__defaults__", (2.0**60, 0))
    made = make()
    go(setup_of(made, **{**HALF, "steps": 1, "optimizer": {"name": name}}), tmp_path / "run")
    go(setup_of(made, **{**HALF, "steps": 2, "optimizer": {"name": name}}), tmp_path / "run", resume=True)
    found = [event["loss_scale"] for event in events(tmp_path / "run") if event["event"] == "step"]
    assert found == [pytest.approx(2.0**60, rel=1e-5), pytest.approx(2.0**59, rel=1e-5)]


@pytest.mark.slow
def test_another_precision_that_is_adopted_begins_with_a_fresh_scale(make, setup_of, tmp_path):
    made = make()
    for last, precision in ((2, "fp32"), (4, "fp16"), (6, "fp32")):
        go(setup_of(made, **{**HALF, "steps": last, "precision": precision}), tmp_path / "run", resume=last > 2,
           adopt=last > 2)
    scales = [event.get("loss_scale") for event in events(tmp_path / "run") if event["event"] == "step"]
    assert scales == [None, None, loss_scale.FIRST, loss_scale.FIRST, None, None]


def test_float32_continues_a_run_that_overflowed_in_every_step(make, setup_of, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale.LossScale.__init__, "__defaults__", (2.0**60, 0))
    made = make()
    go(setup_of(made, **{**HALF, "steps": 1}), tmp_path / "run")
    go(setup_of(made, **{**HALF, "steps": 2, "precision": "fp32"}), tmp_path / "run", resume=True, adopt=True)
    assert [event["step"] for event in events(tmp_path / "run") if event["event"] == "step"] == [1, 2]


def test_a_loss_beyond_float16_is_an_error_that_names_other_precisions(make, setup_of, tmp_path, monkeypatch):
    gather = loop.accumulate

    def large(*args):
        found = gather(*args)
        return replace(found, loss=found.loss * math.inf)

    monkeypatch.setattr(loop, "accumulate", large)
    with pytest.raises(ConfigError, match="loss is inf") as caught:
        go(setup_of(make(), **HALF), tmp_path / "run")
    assert "--precision bf16 or fp32" in caught.value.hint
