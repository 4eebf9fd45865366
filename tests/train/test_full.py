"""Full fine-tuning in little memory: weights in bfloat16, and updates within the backward pass."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from counted_steps import counted
from runs import events, go
from safetensors.torch import load_file

from prep.errors import ConfigError, OutOfMemoryError
from prep.models.families.registry import FAMILIES
from prep.training.optimizers import OPTIMIZERS
from train import loop, state, trial, update
from train.check import check
from train.check.requirements import check_libraries, too_many_ranks
from train.config.load import parse
from train.failures import Progress
from train.memory.room import room_of
from train.memory.step import count
from train.optim.optimizers import TABLE
from train.setup import RunRequest

CPU = torch.device("cpu")
PLAIN = {"method": "full", "steps": 6, "batch_size": 2, "precision": "bf16", "validation": {"every": 0},
         "sample": {"every": 0}, "checkpoint": {"every": 3, "keep": 9}, "optimizer": {"lr": 1e-3, "clip": 0.0}}
SINGLY = [name for name, spec in TABLE.items() if not spec.device and OPTIMIZERS[name].singly
          and (spec.torch < (2, 9) or hasattr(torch.optim, "Muon"))]


def with_settings(dtype="float32", fused=False, **more):
    given = {**PLAIN, **more, "full": {"dtype": dtype, "fused_backward": fused, **more.get("full", {})}}
    return given | {"optimizer": {**PLAIN["optimizer"], **more.get("optimizer", {})}}


def files_in(folder):
    return {path.relative_to(folder): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}


def files_of(run):
    """The tensors, and what the log says but for times."""
    told = [{name: value for name, value in event.items() if name not in ("seconds", "wait", "samples_per_second")}
            for event in events(run)]
    return files_in(run), told


def require_equal(one, other):
    assert one[1] == other[1] and one[0].keys() == other[0].keys()
    for name, tensors in one[0].items():
        wanted = other[0][name]
        assert tensors.keys() == wanted.keys()
        assert all(value.dtype == wanted[each].dtype and torch.equal(value, wanted[each])
                   for each, value in tensors.items()), name


def require_resumed(straight, cut):
    for name in ("checkpoints/step-000006", "unet"):
        require_equal((files_in(cut / name), ()), (files_in(straight / name), ()))


def cases(*quick):
    """All optimizers and dtypes; those that are not `quick` in the slow tests."""
    every = [(name, dtype) for name in SINGLY for dtype in ("float32", "bfloat16")]
    return [pytest.param(*each, marks=() if each in quick else pytest.mark.slow) for each in every]


@pytest.mark.few("adamw-bfloat16")
@pytest.mark.parametrize(("name", "dtype"), cases(("adamw", "bfloat16"), ("adafactor", "float32")))
def test_weights_updated_in_the_backward_pass_are_the_same(make, setup_of, tmp_path, name, dtype):
    """Without clipping, to the bit: weights, what the optimizer keeps, losses and norms."""
    made, optimizer = make(), {"name": name}
    go(setup_of(made, **with_settings(dtype, optimizer=optimizer, steps=3)), tmp_path / "after")
    go(setup_of(made, **with_settings(dtype, True, optimizer=optimizer, steps=3, gradient_checkpointing=True)),
       tmp_path / "within")
    after, within = files_of(tmp_path / "after"), files_of(tmp_path / "within")
    require_equal(within, after)
    name = next(name for name in after[0] if name.parent.name == "unet" and "checkpoints" in name.parts)
    assert {value.dtype for value in after[0][name].values()} == {getattr(torch, dtype)}


@pytest.mark.slow
def test_gradients_of_several_passes_are_whole_before_they_count(make, setup_of, tmp_path):
    """A step has several where references are dropped from a part of the samples: weights are updated in the last."""
    made = make()
    for name, fused in (("after", False), ("within", True)):
        setup = setup_of(made, **with_settings("bfloat16", fused, batch_size=4))
        split = replace(setup, config=replace(setup.config, micro_batch=1))
        go(split, tmp_path / name)
    require_equal(files_of(tmp_path / "within"), files_of(tmp_path / "after"))


@pytest.mark.parametrize(("fused", "clip"), [(True, 0.5), pytest.param(False, 1.0, marks=pytest.mark.slow)])
def test_a_run_in_bfloat16_resumes_bit_by_bit(make, setup_of, tmp_path, fused, clip):
    """With its average, which is float32, and with pictures and validation of that between."""
    setup = setup_of(make(), **with_settings("bfloat16", fused, ema={"decay": 0.9}, optimizer={"clip": clip},
                                             validation={"every": 3, "timesteps": 1}, sample={"every": 3, "steps": 1}))
    go(setup, tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "cut")
    go(setup, tmp_path / "cut", resume=True, named="step-000003")
    straight, cut = (tmp_path / name for name in ("straight", "cut"))
    require_resumed(straight, cut)
    average = load_file(straight / "checkpoints" / "step-000006" / "ema.safetensors")
    result = load_file(straight / "unet" / "diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in average.values()} == {torch.float32}
    assert all(torch.equal(value, average[name]) for name, value in result.items())
    assert (straight / "samples" / "step-000006.png").read_bytes() == (cut / "samples" / "step-000006.png").read_bytes()
    told = [[event for event in events(run) if event["event"] == "validation"] for run in (straight, cut)]
    assert told[0] == told[1] and len({event["loss"] for event in told[0]}) == 3


def test_small_updates_are_not_lost(make, setup_of):
    """AdamW's of 1e-5, of which 48 are half of the step between the numbers just below 0.25: rounded to the nearest
    one, all would be lost. The mean of many weights has them."""
    made, moved = make(), []
    for dtype in ("float32", "bfloat16"):
        setup = setup_of(made, **with_settings(dtype, optimizer={"lr": 1e-5, "weight_decay": 0.0}))
        trainee = loop.create_state(setup, CPU)
        value = max(trainee.denoiser.parameters.values(), key=torch.numel)
        value.data.fill_(0.25)
        for step in range(20):
            value.grad = torch.ones_like(value)
            state.apply_gradients(trainee, setup, step)
        moved.append(float(value.detach().double().mean()) - 0.25)
    assert moved[0] == pytest.approx(-2e-4, rel=0.01) and moved[1] == pytest.approx(moved[0], rel=0.1)


def test_a_gradient_is_clipped_by_itself(make, setup_of, monkeypatch):
    setup = setup_of(make(), **with_settings(fused=True, optimizer={"clip": 0.5}))
    trainee = loop.create_state(setup, CPU)
    every = [value for group in trainee.optimizer.param_groups for value in group["params"]]
    norms, clipped = [], []

    def noted():
        given, = (value for group in trainee.optimizer.param_groups for value in group["params"])
        clipped.append(float(given.grad.norm()))

    monkeypatch.setattr(trainee.optimizer, "step", noted)
    with trainee.singly.apart():
        for norm, (name, value) in zip((0.1, 30.0), trainee.denoiser.parameters.items(), strict=False):
            value.grad = torch.full_like(value, norm / value.numel() ** 0.5)
            norms.append(float(state.apply_gradient(trainee, setup.config, 0, name, value)))
            assert value.grad is None
    assert norms == pytest.approx([0.1, 30.0]) and clipped == pytest.approx([0.1, 0.5], rel=1e-4)
    assert [id(value) for group in trainee.optimizer.param_groups for value in group["params"]] == list(map(id, every))


@pytest.fixture
def good(make, setup_of, tmp_path):
    """A run in bfloat16 whose weights are updated in the backward pass, and its setup."""
    setup = setup_of(make(), **with_settings("bfloat16", True, checkpoint={"every": 2, "keep": 9}))
    go(setup, tmp_path / "good")
    return setup, tmp_path / "good"


def require_resumable(setup, good, run, kept):
    """A run that failed has these checkpoints, and goes on to what it should have been."""
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == kept
    go(setup, run, resume=True)
    require_resumed(good, run)


def test_a_loss_that_is_not_finite_updates_nothing(good, tmp_path, monkeypatch):
    setup, wanted = good
    real, calls = state.sample_losses, []

    def infinite(*args):
        calls.append(None)
        return real(*args) * (float("inf") if len(calls) == 1 + 6 else 1)  # the first one is a trial

    monkeypatch.setattr(state, "sample_losses", infinite)
    with pytest.raises(ConfigError, match=r"^loss is inf in step 6, expected finite numbers; it trained on .*; the "
                                          r"weights are still those of step 5$"):
        go(setup, tmp_path / "run")
    require_resumable(setup, wanted, tmp_path / "run", ["step-000002", "step-000004", "step-000005"])


def fail_at(monkeypatch, step, make):
    """In the middle of the backward pass of a step, `make` makes the norm of a gradient from it, or raises."""
    real, seen = update.apply_gradient, []

    def fail(trainee, config, at, name, value):
        seen.append(at)
        norm = real(trainee, config, at, name, value)
        return make(norm) if seen.count(step) == 5 else norm

    monkeypatch.setattr(update, "apply_gradient", fail)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_the_run(good, tmp_path, monkeypatch):
    """Weights were updated by then, so that they are not saved: the last checkpoint counts."""
    setup, wanted = good
    fail_at(monkeypatch, 4, lambda norm: norm * float("inf"))
    with pytest.raises(ConfigError, match=r"loss is \S+ and the gradient norm inf in step 5, expected finite numbers; "
                                          r"it trained on .*; full.fused_backward had updated the weights by then, so "
                                          r"they are not saved$") as caught:
        go(setup, tmp_path / "run")
    assert "with --resume, which continues from step 4" in caught.value.hint
    monkeypatch.undo()
    require_resumable(setup, wanted, tmp_path / "run", ["step-000002", "step-000004"])


@pytest.mark.slow
def test_memory_that_runs_out_in_the_backward_pass(good, tmp_path, monkeypatch):
    def too_large(norm):
        raise torch.OutOfMemoryError

    setup, wanted = good
    fail_at(monkeypatch, 5, too_large)
    with pytest.raises(OutOfMemoryError, match="ran out of memory in step 6") as caught:
        go(setup, tmp_path / "run")
    assert caught.value.hint == ("--resume continues from step 4: --set gradient_checkpointing=true or --method lora "
                                 "(in another RUN)")
    monkeypatch.undo()
    require_resumable(setup, wanted, tmp_path / "run", ["step-000002", "step-000004"])


def test_a_trial_keeps_no_gradient(make, setup_of, monkeypatch):
    """As the steps: gradients are never there together, and nothing is updated."""
    setup = setup_of(make(), **with_settings(fused=True))
    trainee, there = loop.create_state(setup, CPU), []
    before = {name: value.detach().clone() for name, value in trainee.denoiser.parameters.items()}
    monkeypatch.setattr(trial, "_free", lambda name, value, real=trial._free: [real(name, value), there.append(
        sum(each.grad is not None for each in trainee.denoiser.parameters.values()))])
    trial.warm_up_largest_bucket(trainee, setup, Progress(device=CPU))
    assert there == [0] * len(before) and not trainee.optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in trainee.denoiser.parameters.items())


HALF, FUSED = "full.dtype is 'bfloat16', which ", "full.fused_backward is on, which "


@pytest.mark.parametrize(("settings", "said", "hint"), [
    ({"dtype": "bfloat16", "precision": "fp32"}, f"{HALF}needs forward passes in bf16, but precision is 'fp32'",
     "--precision bf16, or --set full.dtype=float32"),
    ({"fused": True, "precision": "fp16"}, f"{FUSED}updates weights before all gradients are known, but precision is "
     "'fp16', which skips steps whose gradients overflow", "--precision bf16, or --set full.fused_backward=false"),
    ({"fused": True, "optimizer": {"name": "prodigy", "lr": 1.0}}, f"{FUSED}updates one weight at a time, but "
     "optimizer.name is 'prodigy', which needs all of them",
     "--set optimizer.name=adamw, or --set full.fused_backward=false"),
    ({"dtype": "bfloat16", "optimizer": {"name": "adamw-schedule-free"}}, f"{HALF}updates one weight at a time, but "
     "optimizer.name is 'adamw-schedule-free', which needs all of them",
     "--set optimizer.name=adamw, or --set full.dtype=float32"),
    ({"dtype": "bfloat16", "parallel": {"shard": True}}, f"{HALF}is for models that are not divided, but "
     "parallel.shard is on", "--no-shard, or --set full.dtype=float32"),
    ({"fused": True, "micro_batch": 1}, f"{FUSED}updates weights in each backward pass, but batch_size 2 has several, "
     "of micro_batch 1", "--micro-batch 2, or --batch-size 1, or --set full.fused_backward=false")])
def test_what_excludes_it_is_said_before_a_run(settings, said, hint):
    with pytest.raises(ConfigError) as caught:
        check_libraries(parse(with_settings(**settings), ""), FAMILIES["sd15"])
    assert (caught.value.message, caught.value.hint) == (said, hint)
    check_libraries(parse({**with_settings(**settings), "method": "lora", "parallel": {}}, ""), FAMILIES["sd15"])


def test_several_processes_exclude_it():
    config = parse(with_settings(fused=True), "")
    assert too_many_ranks(config, 1) is None
    assert too_many_ranks(config, 2).message == (f"{FUSED}updates weights before gradients are summed, but 2 ranks "
                                                 "have a part of them each")
    assert too_many_ranks(parse(with_settings("bfloat16"), ""), 2) is None


def test_a_run_that_was_planned_with_several_passes_excludes_it(make, setup_of):
    made = make()
    settings = {**with_settings(fused=True), "precision": "fp32"}
    report = check(RunRequest(manifest=made.path), parse(settings, ""), planned=1)
    fault, = report.faults
    assert "the steps of this run were planned with several, of 1 samples" in fault.message


def test_it_may_change_where_the_steps_stay_the_same(make, setup_of, tmp_path):
    """Without clipping; with it --adopt accepts the change. Weights keep their dtype."""
    made = make()
    for clip, dtype, refused in ((0.0, "float32", ""), (1.0, "float32", "add --adopt"),
                                 (0.0, "bfloat16", "another RUN")):
        run = tmp_path / f"{clip}-{dtype}"
        go(setup_of(made, **with_settings(steps=3, optimizer={"clip": clip})), run)
        changed = setup_of(made, **with_settings(dtype, True, steps=4, optimizer={"clip": clip}))
        if not refused:
            go(changed, run, resume=True)
            continue
        with pytest.raises(ConfigError) as caught:
            go(changed, run, resume=True)
        assert refused in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "fused"), [
    ("adamw", "bfloat16", True),
    *(pytest.param(name, dtype, fused, marks=pytest.mark.slow) for name in ("adamw", "adamw-8bit", "adafactor")
      for dtype in ("float32", "bfloat16") for fused in (False, True))])
def test_the_memory_of_a_step_is_known(make, setup_of, name, dtype, fused):
    setup = setup_of(make(masks=False), **with_settings(dtype, fused, ema={"decay": 0.9}, optimizer={"name": name},
                                                        gradient_checkpointing=True))
    (wanted, allocated), given = counted(setup), count(setup, room_of("cpu")).parts
    assert sum(given.values()) == pytest.approx(sum(wanted.values()), rel=0.01)
    scratch = 1 << 17  # of oneDNN within a convolution, whatever its size
    assert sum(given.values()) == pytest.approx(allocated, rel=0.05, abs=scratch)
    same_parts = {"weights", "average", "inputs"}
    assert {part: given.get(part) for part in same_parts} == {part: wanted.get(part) for part in same_parts}
