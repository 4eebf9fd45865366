"""Steps whose numbers are read late, as on one GPU: the same as those of which the host decides, to the bit."""

from __future__ import annotations

import dataclasses
import signal
import traceback

import pytest
import torch
from runs import events
from runs import go as begin
from safetensors.torch import load_file
from second_device import THERE, There, playing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prep.errors import ConfigError
from prep.loader import batches
from train import loop, state, update
from train.optim import optimizers
from train.runs import checkpoint

SETTINGS = {"steps": 8, "batch_size": 4, "micro_batch": 2, "ema": {"decay": 0.9}, "caption_dropout": 0.3,
            "validation": {"every": 3, "timesteps": 2}, "sample": {"every": 0}, "checkpoint": {"every": 4, "keep": 9},
            "schedule": {"warmup": 2}, "lora": {"rank": 2, "dropout": 0.1}}


@pytest.fixture
def fused(monkeypatch):
    """AdamW with the kernels that leave out an update, which the CPU has, too."""
    plain = optimizers.TABLE["adamw"]
    made = dataclasses.replace(plain, build=lambda groups, given, on_gpu: plain.build(groups, given, True))
    monkeypatch.setattr(state, "TABLE", {**optimizers.TABLE, "adamw": made})


@pytest.fixture
def late(monkeypatch, fused):
    """Steps are read late, as if this were a GPU; returns what was done: gathered, updated, logged, in its order."""
    done = []
    monkeypatch.setattr(update, "reads_late", lambda trainee: trainee.spec.skips_on_inf)
    def noted(name, real):
        def go(*args, **named):
            done.append(name.split("_")[0])
            return real(*args, **named)

        return go

    monkeypatch.setattr(loop, "accumulate", noted("gather", loop.accumulate))
    for name in ("apply_gradients", "move_averages", "check_finite"):
        monkeypatch.setattr(update, name, noted(name, getattr(update, name)))
    return done


def files_of(run):
    """The tensors, and what the log says but for times."""
    found = {path.relative_to(run): path.read_bytes() for path in sorted(run.rglob("*.safetensors"))}
    found["losses.bin"] = (run / "losses.bin").read_bytes()
    told = [{name: value for name, value in event.items()
             if name not in ("seconds", "wait", "samples_per_second")} for event in events(run)]
    return found, told


@pytest.mark.few("lora")
@pytest.mark.parametrize("settings", [{}, {"method": "full"}], ids=["lora", "full"])
def test_a_run_is_the_same(make, setup_of, tmp_path, fused, request, settings):
    setup = setup_of(make(views=2, texts=2), **{**SETTINGS, **settings})
    begin(setup, tmp_path / "checked")
    done = request.getfixturevalue("late")
    begin(setup, tmp_path / "late")
    assert files_of(tmp_path / "late") == files_of(tmp_path / "checked")
    assert len(files_of(tmp_path / "late")[0]) >= 7
    # The second step's passes are on their way before the first one's numbers are read.
    assert done[:6] == ["gather", "apply", "gather", "check", "move", "apply"]
    assert done.count("apply") == done.count("check") == done.count("move") == setup.steps


def test_the_numbers_of_a_step_are_read_before_what_follows_it(make, setup_of, tmp_path, late):
    """Validation is due after steps 3 and 6, and all ends after 8: the next passes come after these."""
    begin(setup_of(make(), **{**SETTINGS, "checkpoint": {"every": 0}}), tmp_path / "run")
    told = "".join(name[0] for name in late if name in ("gather", "check"))
    assert told == "g" + "gc" + "gcc" + "g" + "gc" + "gcc" + "g" + "gcc"  # g: passes of a step, c: its numbers are read


@pytest.mark.parametrize("where", [
    pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 5,
    pytest.param(8, marks=pytest.mark.slow)], ids=["first", "checkpoint", "after-checkpoint", "last"])
def test_a_step_that_is_not_finite_changes_nothing(make, setup_of, tmp_path, monkeypatch, late, where):
    made = make()
    begin(setup_of(made, **{**SETTINGS, "checkpoint": {"every": 1, "keep": 99}}), tmp_path / "good")
    gather, calls = loop.accumulate, []

    def infinite(trainee, *args):
        found = gather(trainee, *args)
        calls.append(found)
        if len(calls) == where:
            next(iter(trainee.denoiser.parameters.values())).grad.fill_(float("nan"))
        return found

    monkeypatch.setattr(loop, "accumulate", infinite)
    with pytest.raises(ConfigError, match=f"the gradient norm nan in step {where}, .* those of step {where - 1}$"):
        begin(setup_of(made, **SETTINGS), tmp_path / "run")
    told = [event["step"] for event in events(tmp_path / "run") if event["event"] == "step"]
    assert told == list(range(1, where))
    if where > 1:
        name = checkpoint.step_name(where - 1)
        kept, good = (tmp_path / run / "checkpoints" / name for run in ("run", "good"))
        for path in good.rglob("*.safetensors"):
            mine, wanted = load_file(kept / path.relative_to(good)), load_file(path)
            assert mine.keys() == wanted.keys() and all(mine[each].equal(wanted[each]) for each in wanted), path.name
        monkeypatch.setattr(loop, "accumulate", gather)
        begin(setup_of(made, **SETTINGS), tmp_path / "run", resume=True)
        mine, wanted = (load_file(tmp_path / run / "lora.safetensors") for run in ("run", "good"))
        assert all(mine[each].equal(wanted[each]) for each in wanted)


@pytest.mark.slow
def test_a_failure_in_the_next_pass_loses_no_step(make, setup_of, tmp_path, monkeypatch, late):
    """Step 2's numbers are not read yet when step 3 fails."""
    made = make()
    setup = setup_of(made, **{**SETTINGS, "validation": {"every": 0}})
    begin(setup, tmp_path / "good")
    gather, calls = loop.accumulate, []

    def fail_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("shapes differ")
        return gather(*args)

    monkeypatch.setattr(loop, "accumulate", fail_third)
    with pytest.raises(RuntimeError, match="shapes differ"):
        begin(setup, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    monkeypatch.setattr(loop, "accumulate", gather)
    begin(setup, tmp_path / "run", resume=True)
    (mine, told), (wanted, wanted_told) = files_of(tmp_path / "run"), files_of(tmp_path / "good")
    assert {name: mine.get(name) for name in wanted} == wanted
    pick = ("step", "loss", "grad_norm", "lr")
    assert [[event[name] for name in pick] for event in told if event["event"] == "step"] == [
        [event[name] for name in pick] for event in wanted_told if event["event"] == "step"]


def test_ctrl_c_is_heard_after_the_step(make, setup_of, tmp_path, late):
    def watch(event):
        if event["event"] == "step" and event["step"] == 2:  # told while step 3 is under way
            signal.raise_signal(signal.SIGINT)

    setup = setup_of(make(), **{**SETTINGS, "checkpoint": {"every": 0}, "validation": {"every": 0}})
    with pytest.raises(KeyboardInterrupt):
        begin(setup, tmp_path / "run", watch=watch)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]


class Waits(TorchDispatchMode):
    """Notes what a GPU's host would wait for: numbers read, and copies, but those that `allowed` is on for."""

    def __init__(self):
        super().__init__()
        self.allowed, self.found = False, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        there = [isinstance(value, There) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        waits = operator is torch.ops.aten._local_scalar_dense.default and any(there)
        if operator is torch.ops.aten._to_copy.default and "device" in (kwargs or {}):
            waits = isinstance(args[0], There) != (torch.device(kwargs["device"]) == THERE)
        if operator is torch.ops.aten.copy_.default:
            waits = len(set(there)) == 2
        if waits and not self.allowed:
            self.found.append((str(operator), "".join(traceback.format_stack(limit=14))))
        return operator(*args, **kwargs)


def test_the_host_waits_for_nothing_between_the_pauses(make, setup_of, tmp_path, monkeypatch, late):
    """But for batches, which come from pinned memory, and for the numbers of the step before."""
    real, waits, watched = update.Late.finish, Waits(), []

    def free(self):
        waits.allowed = True
        real(self)
        waits.allowed = False

    def free_copy(tensor, device, real=batches.to_device):
        waits.allowed = True
        try:
            return real(tensor, device)
        finally:
            waits.allowed = False

    class Copies(update.Arriving):
        def __init__(self, *tensors):
            waits.allowed = True
            super().__init__(*tensors)
            waits.allowed = False

    def gather(*args, real=loop.accumulate):
        waits.found.clear()
        found = real(*args)
        watched.append(list(waits.found))
        waits.found.clear()
        return found

    def make_update(self, step, gathered, real=update.Late.make):
        waits.found.clear()
        real(self, step, gathered)
        watched.append(list(waits.found))

    monkeypatch.setattr(update.Late, "finish", free)
    monkeypatch.setattr(batches, "to_device", free_copy)
    monkeypatch.setattr(update, "Arriving", Copies)
    monkeypatch.setattr(loop, "accumulate", gather)
    monkeypatch.setattr(update.Late, "make", make_update)
    plain = optimizers.TABLE["adamw"]
    monkeypatch.setattr(state, "TABLE", {"adamw": plain})  # fused kernels do not know the second device
    monkeypatch.setattr(update, "apply_gradients", lambda *args, only_if, real=update.apply_gradients: real(*args))
    setup = setup_of(make(), **{**SETTINGS, "steps": 3, "validation": {"every": 0}, "checkpoint": {"every": 0},
                                "loss": {"masked": True, "min_snr": 5.0}})
    with playing() as there, waits:
        begin(setup, tmp_path / "run", device=there)
    assert len(watched) == 6 and [each for part in watched for each in part] == []
