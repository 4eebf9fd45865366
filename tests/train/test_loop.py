"""The whole run: resumed bit by bit, interrupted with a checkpoint, its result and its log."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import UNet2DConditionModel
from runs import events, go
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prep.errors import CacheError, ConfigError, ModelError, OutOfMemoryError
from prep.fs.place import Local
from prep.loader.rows import Rows
from prep.training.schema import Result
from train import evaluate, failures, loop, update
from train.check import check
from train.config.load import parse
from train.failures import Progress
from train.objectives import forward
from train.optim import optimizers
from train.runs import heart, saver
from train.runs.directory import checkpoint_bytes
from train.setup import RunRequest

QUICK = {"validation": {"every": 0}, "sample": {"every": 0}, "batch_size": 4, "micro_batch": 2, "steps": 12}


OTHERS = [name for name in optimizers.TABLE if name not in ("adamw", "adamw-8bit-paged", "muon")]
FEW = ("adamw-8bit", "prodigy")  # the others resume exactly in the slow tests
OTHERS += ["muon"] if hasattr(torch.optim, "Muon") else []


def interrupt_after(step):
    """A watcher that sends what Ctrl-C sends."""

    def watch(event):
        if event["event"] == "step" and event["step"] == step:
            signal.raise_signal(signal.SIGINT)

    return watch


@pytest.mark.few("lora")
@pytest.mark.parametrize(("settings", "stds"), [
    ({"caption_dropout": 0.3, "lora": {"rank": 4, "dropout": 0.2}, "ema": {"decay": 0.9}, "loss": {"masked": True}},
     False),
    ({"method": "full", "schedule": {"name": "cosine", "warmup": 3}, "optimizer": {"lr": 1e-3}}, False),
    ({"lora": {"rank": 4}, "noise": {"offset": 0.1, "pyramid": 0.3, "perturbation": 0.1}}, True),
    *(pytest.param({"lora": {"rank": 4, "targets": "kohya"}, "optimizer": {"name": name}, "schedule": {"warmup": 8}},
                   False, marks=() if name in FEW else pytest.mark.slow) for name in OTHERS),
    pytest.param({"lora": {"rank": 4, "targets": "kohya-conv", "dora": True, "dropout": 0.2}, "ema": {"decay": 0.9},
                  "schedule": {"name": "cosine"}}, False, marks=pytest.mark.slow),
    pytest.param({"lora": {"rank": 4, "init": "pissa", "dropout": 0.2, "targets": "kohya-conv"}, "ema": {"decay": 0.9}},
                 False, marks=pytest.mark.slow),
    pytest.param({"lora": {"kind": "loha", "rank": 3, "targets": "kohya-conv"}, "ema": {"decay": 0.9}}, False,
                 marks=pytest.mark.slow),
    pytest.param({"lora": {"kind": "lokr", "rank": 1, "targets": "kohya-conv", "factor": 2},
                  "optimizer": {"name": OTHERS[-2]}}, False, marks=pytest.mark.slow),
    pytest.param({"lora": {"rank": 4, "dora": True, "format": "kohya"}, "optimizer": {"name": OTHERS[-1]}}, False,
                 marks=pytest.mark.slow),
    pytest.param({"method": "full", "optimizer": {"name": "adamw-8bit"}}, False, marks=pytest.mark.slow),
    ({"method": "full", "full": {"train": ["attn2"]}, "ema": {"decay": 0.9, "snapshots": True}}, False),
    ({"lora": {"rank": 2, "dropout": 0.3}, "preserve": {"prior": True, "unmasked": 0.5, "prompted": 0.7,
                                                           "prompts": ["", "a red circle"]},
      "ema": {"snapshots": True}}, False),
    pytest.param({"lora": {"rank": 2, "dropout": 0.3}, "slider": {"positive": "a red circle"}}, False,
                 marks=pytest.mark.slow),
], ids=["lora", "full", "posterior", *OTHERS, "dora", "pissa", "loha", "lokr", "dora-kohya", "full-8bit", "part",
        "preserve", "slider"])
def test_six_steps_and_six_after_an_interrupt_are_twelve(make, setup_of, tmp_path, settings, stds):
    made = make(texts=2, views=2, stds=stds, prior="preserve" in settings)
    setup = setup_of(made, **QUICK, **settings)
    go(setup, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        go(setup, tmp_path / "broken", watch=interrupt_after(6))
    assert [path.name for path in (tmp_path / "broken" / "checkpoints").iterdir()] == ["step-000006"]
    go(setup, tmp_path / "broken", resume=True)
    names = [path.relative_to(tmp_path / "straight") for path in (tmp_path / "straight").rglob("*.safetensors")]
    assert len(names) >= 3
    for name in names:
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes(), name
    kept = [(tmp_path / run / "losses.bin").read_bytes() for run in ("straight", "broken")]
    assert kept[0] == kept[1] and len(kept[0]) > 12 * 20
    losses = [[event["loss"] for event in events(tmp_path / run) if event["event"] == "step"]
              for run in ("straight", "broken")]
    assert losses[0] == losses[1] and len(losses[0]) == 12


@pytest.mark.parametrize("settings", [{"lora": {"rank": 2, "init": "pissa"}},
                                      pytest.param({"method": "full"}, marks=pytest.mark.slow)], ids=str)
def test_where_an_average_is_kept_changes_no_bit_and_may_change_on_resume(make, setup_of, tmp_path, settings):
    made, found = make(), {}
    for first, then in (("model", "model"), ("cpu", "model"), ("model", "cpu")):
        run = tmp_path / f"{first}-{then}"
        for last, place in ((2, first), (4, then)):
            again = {**QUICK, **settings, "steps": last, "ema": {"decay": 0.9, "device": place, "snapshots": True},
                     "validation": {"every": 1, "timesteps": 2}}
            go(setup_of(made, **again), run, resume=last > 2)
        files = {path.relative_to(run): load_file(path) for path in run.rglob("*.safetensors")}
        found[first, then] = files, [event["loss"] for event in events(run) if event["event"] in ("step", "validation")]
    usual, losses = found["model", "model"]
    assert len([name for name in usual if name.name == "ema.safetensors"]) == 2
    for files, other in found.values():
        assert other == losses and files.keys() == usual.keys()
        assert all(torch.equal(value, files[name][each]) for name, tensors in usual.items()
                   for each, value in tensors.items())


def test_timesteps_are_drawn_as_the_settings_say(make, setup_of, tmp_path, monkeypatch):
    setup = setup_of(make(), **QUICK, lora={"rank": 2}, timesteps={"low": 0.25, "high": 0.5, "distribution": "mode"},
                     loss={"huber": 0.1, "weighting": "debiased"})
    drawn, gather = [], loop.accumulate

    def watched(*args):
        found = gather(*args)
        drawn.extend(shot.timestep for shots, _ in found.parts for shot in shots)
        return found

    monkeypatch.setattr(loop, "accumulate", watched)
    go(setup, tmp_path / "run")
    assert len(drawn) > 20 and all(250 <= timestep < 500 for timestep in drawn)


def test_a_rescaled_schedule_trains_on_pure_noise(make, setup_of, tmp_path):
    """Only the last timestep: the input is the noise itself, and the target minus the latent."""
    settings = {**QUICK, "steps": 2, "method": "full", "timesteps": {"low": 0.9995}}
    setup = setup_of(make(prediction="v_prediction"), **settings, zero_terminal_snr=True)
    seen, whole = [], forward.loss.noised

    def watched(kind, latent, noise, level):
        seen.append((torch.equal(whole(kind, latent, noise, level), noise), level.tolist()))
        return whole(kind, latent, noise, level)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward.loss, "noised", watched)
        go(setup, tmp_path / "run")
    trained = [each for each in seen if set(each[1]) == {0.0}]
    assert len(trained) >= 2 and all(same for same, _ in trained)
    assert all(event["loss"] > 0 for event in events(tmp_path / "run") if event["event"] == "step")


@pytest.mark.slow
def test_each_noise_of_the_settings_is_trained_on(make, setup_of, tmp_path):
    made, losses = make(), {}
    for name in ("none", "offset", "pyramid", "perturbation"):
        noise = {} if name == "none" else {name: 0.5}
        go(setup_of(made, **{**QUICK, "steps": 1, "lora": {"rank": 2}, "noise": noise}), tmp_path / name)
        losses[name] = next(event["loss"] for event in events(tmp_path / name) if event["event"] == "step")
    assert len(set(losses.values())) == 4


@pytest.mark.slow
def test_a_schedule_free_run_is_judged_and_given_away_by_its_average(make, setup_of, tmp_path):
    """Validation and the result have x; the checkpoint has y as well, which no look changes."""
    made = make()
    plain = {**QUICK, "steps": 6, "lora": {"rank": 2}, "optimizer": {"name": "adamw-schedule-free", "lr": 0.02}}
    go(setup_of(made, **plain), tmp_path / "plain")
    looks = {**plain, "validation": {"every": 1, "timesteps": 2}, "sample": {"every": 3, "steps": 2, "size": [64, 64]}}
    go(setup_of(made, **looks), tmp_path / "looks")
    at = "checkpoints/step-000006"
    for name in ("lora.safetensors", f"{at}/lora.safetensors", f"{at}/optimizer.safetensors"):
        assert tensors(tmp_path / "plain" / name) == tensors(tmp_path / "looks" / name)
    result = tensors(tmp_path / "looks" / "lora.safetensors")
    assert result == tensors(tmp_path / "looks" / at / "ema.safetensors")
    assert result != tensors(tmp_path / "looks" / at / "lora.safetensors")
    with safe_open(tmp_path / "looks" / "lora.safetensors", "pt") as file:
        assert file.metadata()["latentry.weights"] == "schedule-free average"
    asked = RunRequest(manifest=made.path, init=Local(tmp_path / "looks" / "lora.safetensors"))
    again = check(asked, parse({"precision": "fp32", **looks, "steps": 1}, "test")).setup
    go(again, tmp_path / "again")
    first = next(event for event in events(tmp_path / "again") if event["event"] == "validation")
    last = [event for event in events(tmp_path / "looks") if event["event"] == "validation"][-1]
    assert first["losses"] == pytest.approx(last["losses"], abs=1e-7), "the last validation was that of the result"


@pytest.mark.slow
def test_layers_learn_at_their_own_rate(make, setup_of, tmp_path):
    """A layer at rate 0 stays where it began, also after a resume; the schedule scales every rate."""
    made = make()
    given = {**QUICK, "lora": {"rank": 2, "layers": [{"match": "to_q", "lr": 0.0}, {"match": "to_k", "lr": 0.01}]},
             "schedule": {"name": "linear"}, "optimizer": {"lr": 1e-3, "weight_decay": 0.0}}
    go(setup_of(made, **{**given, "steps": 12}), tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        go(setup_of(made, **given), tmp_path / "broken", watch=interrupt_after(6))
    go(setup_of(made, **given), tmp_path / "broken", resume=True)
    found = [tensors(tmp_path / run / "lora.safetensors") for run in ("straight", "broken")]
    assert found[0] == found[1]
    ups = {name: torch.tensor(value).abs().max() for name, value in found[0].items() if name.endswith("lora_up.weight")}
    assert all(float(most) == 0 for name, most in ups.items() if "to_q" in name)
    assert min(most for name, most in ups.items() if "to_k" in name) > 3 * max(
        most for name, most in ups.items() if "to_v" in name)
    trainee = loop.create_state(setup_of(made, **given), torch.device("cpu"))
    assert [group["rate"] for group in trainee.optimizer.param_groups] == [0.0, 0.01, None]


@pytest.mark.parametrize("name", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS
                                             if name not in ("prodigy", "adamw-schedule-free"))])
def test_a_rate_of_layers_that_changes_nothing_leaves_every_bit(make, setup_of, tmp_path, name):
    """Layers get a rate of their own, which is that of the others: what the optimizer keeps is by parameter."""
    made = make()
    given = {**QUICK, "lora": {"rank": 2}, "optimizer": {"name": name, "lr": 1e-3}}
    layers = {"rank": 2, "layers": [{"match": "to_k", "lr": 1e-3}]}
    go(setup_of(made, **{**given, "steps": 4}), tmp_path / "straight")
    go(setup_of(made, **{**given, "steps": 2}), tmp_path / "added")
    go(setup_of(made, **{**given, "steps": 3, "lora": layers}), tmp_path / "added", resume=True)
    go(setup_of(made, **{**given, "steps": 4}), tmp_path / "added", resume=True)
    assert tensors(tmp_path / "added" / "lora.safetensors") == tensors(tmp_path / "straight" / "lora.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file", "kind"), [("adamw", "lora", ""), ("adamw-schedule-free", "optimizer", "z/")])
def test_layers_stay_where_they_are_from_the_step_that_gives_them_rate_0(make, setup_of, tmp_path, name, file, kind):
    """Of a schedule-free optimizer its z; the weights are between that and the average."""
    made = make()
    rates = {lr: {"rank": 2, "layers": [{"match": "to_q", "lr": lr}]} for lr in (0.01, 0.0)}
    given = {**QUICK, "optimizer": {"name": name, "lr": 1e-3}}
    go(setup_of(made, **{**given, "steps": 2, "lora": rates[0.01]}), tmp_path / "run")
    go(setup_of(made, **{**given, "steps": 4, "lora": rates[0.0]}), tmp_path / "run", resume=True)
    before, after = (tensors(tmp_path / "run" / "checkpoints" / f"step-{step:06}" / f"{file}.safetensors")
                     for step in (2, 4))
    kept = [key for key in before if key.startswith(kind) and not key.endswith("alpha")]
    assert {key for key in kept if before[key] == after[key]} == {key for key in kept if "to_q" in key} != set()


def test_frozen_weights_stay_and_are_in_every_file(make, setup_of, tmp_path, tiny_model):
    """Those of --init-from, too, also after a resume: a checkpoint is whole, and the optimizer keeps only its part."""
    made = make()
    go(setup_of(made, **{**QUICK, "steps": 2}, method="full", optimizer={"lr": 0.01}), tmp_path / "first")
    given = {**QUICK, "precision": "fp32", "method": "full", "full": {"train": ["attn2"], "freeze": ["to_out.0"]}}
    asked = RunRequest(manifest=made.path, init=Local(tmp_path / "first" / "unet"))
    setup = check(asked, parse({**given, "steps": 4, "checkpoint": {"every": 2}}, "test")).setup
    go(setup, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    go(setup_of(made, **{**given, "steps": 4, "checkpoint": {"every": 2}}), tmp_path / "run", resume=True)
    weights = "unet/diffusion_pytorch_model.safetensors"
    first, found = (tensors(tmp_path / run / weights) for run in ("first", "run"))
    assert first.keys() == found.keys() == tensors(tiny_model / weights).keys()
    changed = {name for name in first if first[name] != found[name]}
    assert changed == {name for name in first if ".attn2." in name and ".to_out.0." not in name}
    assert changed == {name.partition("/")[2] for name in tensors(
        tmp_path / "run" / "checkpoints" / "step-000004" / "optimizer.safetensors")}
    last = tmp_path / "run" / "checkpoints" / "step-000004"
    sizes = [path.read_bytes() for path in last.rglob("*.safetensors")]
    assert checkpoint_bytes(setup) == sum(len(data) - 8 - int.from_bytes(data[:8], "little") for data in sizes)
    UNet2DConditionModel.from_pretrained(tmp_path / "run" / "unet", low_cpu_mem_usage=False)


def test_a_checkpoint_of_another_optimizer_is_refused(make, setup_of, tmp_path):
    made = make()
    go(setup_of(made, **{**QUICK, "steps": 2}, lora={"rank": 2}), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optimizer\.name is 'lion', but the checkpoint was trained with 'adamw'"):
        go(setup_of(made, **{**QUICK, "steps": 4}, lora={"rank": 2}, optimizer={"name": "lion"}), tmp_path / "run",
           resume=True, adopt=True)


@pytest.mark.parametrize(("name", "settings"), [
    ("adamw-schedule-free", {}), ("adamw", {"ema": {"decay": 0.9}}),
    ("adafactor", {"method": "full", "ema": {"decay": 0.9}}),
    *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("adamw", "adafactor")),
    *(pytest.param(name, {"method": method, **precision, **average}, marks=pytest.mark.slow)
      for name, spec in optimizers.TABLE.items() if not spec.device
      for method, precision in (("lora", {}), ("full", {}), ("full", {"precision": "bf16",
                                                                      "full": {"dtype": "bfloat16"}}))
      for average in ({}, {"ema": {"decay": 0.9}})
      if not (precision or average) or name not in ("adamw-schedule-free", "prodigy"))])
def test_the_size_of_a_checkpoint_is_known_before(make, setup_of, tmp_path, name, settings):
    """All but the numbers beside its tensors, and the files' headers."""
    pytest.importorskip(optimizers.TABLE[name].library or "torch")
    setup = setup_of(make(), **{**QUICK, "steps": 1, **settings}, lora={"rank": 2}, optimizer={"name": name})
    go(setup, tmp_path / "run")
    files = list((tmp_path / "run" / "checkpoints" / "step-000001").rglob("*.safetensors"))
    found = sum(len(path.read_bytes()) - 8 - int.from_bytes(path.read_bytes()[:8], "little") for path in files)
    alphas = sum(4 for path in files for key in tensors(path) if key.endswith(".alpha"))
    numbers = 8 * len(optimizers.TABLE[name].numbers)
    assert checkpoint_bytes(setup) == pytest.approx(found - alphas - numbers, rel=0.001)


def test_training_lowers_the_loss(make, setup_of, tmp_path):
    made = make(counts=(4, 0), validation=0)
    setup = setup_of(made, **{**QUICK, "steps": 40}, method="full", optimizer={"lr": 3e-3})
    go(setup, tmp_path / "run")
    losses = [event["loss"] for event in events(tmp_path / "run") if event["event"] == "step"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_the_log_has_an_event_a_line(make, setup_of, tmp_path):
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 2}, lora={"rank": 2})
    go(setup, tmp_path / "run")
    found = events(tmp_path / "run")
    assert [event["event"] for event in found] == ["start", "step", "step", "checkpoint", "end"]
    assert set(found[1]) == {"event", "step", "loss", "lr", "grad_norm", "samples", "seconds", "wait",
                             "samples_per_second"}
    assert found[0]["steps_per_epoch"] == setup.plan.steps_per_epoch


def test_a_checkpoint_is_shown_when_it_is_whole_and_logged_where_it_belongs(make, setup_of, tmp_path, monkeypatch):
    """Written beside the next step, the last one after the last; the log is that of a run that waits for each."""
    made, write, next_step = make(), saver.save, threading.Event()
    plain = {**QUICK, "steps": 4, "lora": {"rank": 2}}
    go(setup_of(made, **plain, checkpoint={"every": 2, "copy_gib": 0.0}), tmp_path / "waited")

    def slow(run, state, parts, keep):
        assert state.step != 2 or next_step.wait(30)
        return write(run, state, parts, keep)

    monkeypatch.setattr(saver, "save", slow)
    shown = []

    def watch(event):
        whole = (tmp_path / "run" / "checkpoints" / f"step-{event['step']:06d}" / "state.json").is_file()
        shown.append((event["event"], event["step"]) + ((whole,) if event["event"] == "checkpoint" else ()))
        if shown[-1] == ("step", 3):
            next_step.set()

    go(setup_of(made, **plain, checkpoint={"every": 2}), tmp_path / "run", watch=watch)
    assert shown.index(("checkpoint", 2, True)) > shown.index(("step", 3))
    assert shown[-2:] == [("checkpoint", 4, True), ("end", 4)]
    told = [[(event["event"], event["step"]) for event in events(tmp_path / name)] for name in ("waited", "run")]
    assert told[0] == told[1] == [("start", 0), ("step", 1), ("step", 2), ("checkpoint", 2), ("step", 3), ("step", 4),
                                  ("checkpoint", 4), ("end", 4)]


def test_a_checkpoint_that_could_not_be_written_is_not_shown(make, setup_of, tmp_path, monkeypatch):
    shown, write = [], saver.save

    def full(run, state, parts, keep):
        if state.step == 2:
            raise OSError(28, "No space left on device", str(run))
        return write(run, state, parts, keep)

    monkeypatch.setattr(saver, "save", full)
    setup = setup_of(make(), **{**QUICK, "steps": 4, "lora": {"rank": 2}, "checkpoint": {"every": 2}})
    with pytest.raises(CacheError, match="No space left on device"):
        go(setup, tmp_path / "run", watch=shown.append)
    there = [f"checkpoints/{name}" for name in kept(tmp_path / "run")]
    assert [event["folder"] for event in shown if event["event"] == "checkpoint"] == there
    assert "checkpoints/step-000002" not in there


def test_the_checkpoint_of_a_stop_is_shown_before_the_stop(make, setup_of, tmp_path):
    shown = []

    def watch(event):
        interrupt_after(2)(event)
        shown.append((event["event"], kept(tmp_path / "run")))

    with pytest.raises(KeyboardInterrupt):
        go(setup_of(make(), **QUICK, lora={"rank": 2}), tmp_path / "run", watch=watch)
    assert shown[-2:] == [("checkpoint", ["step-000002"]), ("stopped", ["step-000002"])]


def test_a_look_changes_no_weight(make, setup_of, tmp_path):
    """Validation and sample pictures, with the moving average swapped in, leave training as it was."""
    made = make()
    plain = {**QUICK, "steps": 4, "lora": {"rank": 2, "dropout": 0.1}, "ema": {"decay": 0.9}}
    go(setup_of(made, **plain), tmp_path / "plain")
    looks = {**plain, "validation": {"every": 1, "timesteps": 2}, "sample": {"every": 2, "steps": 2, "size": [64, 64]}}
    go(setup_of(made, **looks), tmp_path / "looks")
    for name in ("lora.safetensors", "checkpoints/step-000004/lora.safetensors"):
        assert tensors(tmp_path / "plain" / name) == tensors(tmp_path / "looks" / name)
    found = events(tmp_path / "looks")
    assert [event["step"] for event in found if event["event"] == "validation"] == [0, 1, 2, 3, 4]
    pictures = [event["picture"] for event in found if event["event"] == "sample"]
    assert pictures == [f"samples/step-{step:06d}.png" for step in (0, 2, 4)]
    assert all((tmp_path / "looks" / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)


def tensors(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118


def test_the_result_is_the_moving_average_and_says_where_it_comes_from(make, setup_of, tmp_path):
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 3}, lora={"rank": 2}, ema={"decay": 0.5})
    go(setup, tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "step-000003"
    assert tensors(tmp_path / "run" / "lora.safetensors") == tensors(last / "ema.safetensors")
    assert tensors(tmp_path / "run" / "lora.safetensors") != tensors(last / "lora.safetensors")
    with safe_open(tmp_path / "run" / "lora.safetensors", "pt") as file:
        facts = file.metadata()
    assert facts["latentry.weights"] == "moving average"
    assert facts["latentry.manifest"] == made.manifest.digest and facts["latentry.step"] == "3"
    assert json.loads(facts["latentry.config"])["lora"]["rank"] == 2
    assert json.loads(facts["latentry.models"]) == made.manifest.document["models"]


def result_and_checkpoint(setup, run):
    """The tensors of a run's result, and of its last checkpoint."""
    go(setup, run)
    name = "lora.safetensors" if setup.config.method == "lora" else "unet/diffusion_pytorch_model.safetensors"
    return load_file(run / name), load_file(run / "checkpoints" / f"step-{setup.steps:06d}" / name)


def dtypes(tensors):
    return {value.dtype for value in tensors.values()}


@pytest.mark.parametrize(("method", "dtype", "wanted"), [
    ("lora", "float16", torch.float16), ("full", "bfloat16", torch.bfloat16),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("lora", "bfloat16", torch.bfloat16), ("full", "float16", torch.float16)))])
def test_the_result_has_the_dtype_that_is_asked_for(make, setup_of, tmp_path, dtype, wanted, method):
    setup = setup_of(make(), **{**QUICK, "steps": 2}, method=method, lora={"rank": 2}, result={"dtype": dtype})
    result, kept = result_and_checkpoint(setup, tmp_path / "run")
    assert (dtypes(result), dtypes(kept)) == ({wanted}, {torch.float32})
    assert all(torch.equal(value, kept[name].to(wanted)) for name, value in result.items())
    if method == "full":
        loaded = UNet2DConditionModel.from_pretrained(tmp_path / "run" / "unet", low_cpu_mem_usage=False)
        assert all(torch.equal(value, result[name].float()) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize(("stored", "method", "wanted"), [
    (torch.float16, "full", torch.float16), (torch.float8_e4m3fn, "full", torch.bfloat16),
    (torch.float16, "lora", torch.float32), *(pytest.param(one, "full", one, marks=pytest.mark.slow)
                                              for one in (torch.bfloat16, torch.float32))])
def test_the_result_has_the_dtype_of_the_base_unless_asked(make, tmp_path, tiny_model, stored, method, wanted):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: value.to(stored) for name, value in load_file(weights).items()}, weights)
    setup = check(RunRequest(manifest=make().path, model=str(model)),
                  parse({**QUICK, "steps": 1, "method": method, "lora": {"rank": 2}}, "test")).setup
    result, kept = result_and_checkpoint(setup, tmp_path / "run")
    assert (dtypes(result), dtypes(kept)) == ({wanted}, {torch.float32})


def test_what_float16_cannot_hold_becomes_bfloat16_unless_it_was_asked_for(make, tmp_path, tiny_model):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    values = {name: value.half() for name, value in load_file(weights).items()}
    save_file({**values, "conv_out.bias": torch.full_like(values["conv_out.bias"], 4e4)}, weights)
    setup = check(RunRequest(manifest=make().path, model=str(model)),
                  parse({**QUICK, "steps": 1, "method": "full", "optimizer": {"lr": 1.0, "weight_decay": 3.0}},
                        "test")).setup
    assert dtypes(result_and_checkpoint(setup, tmp_path / "run")[0]) == {torch.bfloat16}


def test_a_weight_that_float16_cannot_hold_costs_no_step(make, setup_of, tmp_path):
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 2}, lora={"rank": 2, "alpha": 70000.0}, optimizer={"lr": 1e-9},
                     result={"dtype": "float16"})
    with pytest.raises(ConfigError) as error:
        go(setup, tmp_path / "run")
    assert re.fullmatch(r"'lora_unet_.*\.alpha' has values that float16 cannot hold, so the result is not written",
                        error.value.message)
    assert "--set result.dtype=bfloat16" in error.value.hint
    assert not (tmp_path / "run" / "lora.safetensors").exists()
    go(replace(setup, config=replace(setup.config, result=Result(dtype="bfloat16"))), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "lora.safetensors").is_file()


def test_full_fine_tuning_writes_a_directory_that_diffusers_loads(make, setup_of, tmp_path):
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 2}, method="full")
    go(setup, tmp_path / "run")
    unet = UNet2DConditionModel.from_pretrained(tmp_path / "run" / "unet", low_cpu_mem_usage=False)
    kept = tensors(tmp_path / "run" / "checkpoints" / "step-000002" / "unet" / "diffusion_pytorch_model.safetensors")
    assert {name: value.tolist() for name, value in unet.named_parameters()} == kept
    assert str(tmp_path) not in (tmp_path / "run" / "unet" / "config.json").read_text()


def test_a_model_with_other_encoders_says_so_in_the_result(make, tiny_model, tmp_path):
    """`--allow-other-encoders` is no secret."""
    made = make()
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "vae" / "config.json").read_text())
    (other / "vae" / "config.json").write_text(json.dumps({**config, "scaling_factor": 0.5}))
    asked = RunRequest(manifest=made.path, model=str(other), other_encoders=True)
    setup = check(asked, parse({**QUICK, "steps": 1, "precision": "fp32"}, "x")).setup
    go(setup, tmp_path / "run")
    with safe_open(tmp_path / "run" / "lora.safetensors", "pt") as file:
        assert json.loads(file.metadata()["latentry.other_encoders"]) == dict(setup.model.others)
        assert "latentry.weights" not in file.metadata()


def test_pictures_that_cannot_be_made_are_a_warning(make, setup_of, tmp_path, tiny_model):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    made = make(model=model)
    setup = setup_of(made, **{**QUICK, "steps": 2, "sample": {"every": 1, "steps": 2}})
    (model / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"torn")
    go(setup, tmp_path / "run")
    texts = [event["text"] for event in events(tmp_path / "run") if event["event"] == "warning"]
    assert len(texts) == 3 and all(text.startswith("no sample pictures: ") for text in texts)
    assert all("has no safetensors header" in text for text in texts)


def test_a_denoiser_that_cannot_be_read_is_said(make, setup_of, tmp_path, tiny_model):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    made = make(model=model)
    setup = setup_of(made, **QUICK)
    (model / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="has no safetensors header") as caught:
        go(setup, tmp_path / "run")
    assert caught.value.exit_code == 6


def test_a_loss_that_is_no_number_ends_the_run(make, setup_of, tmp_path):
    made = make()
    setup = setup_of(made, **QUICK, method="full", optimizer={"lr": 100.0, "clip": 0.0})
    said = (r"loss is \S+ and the gradient norm \S+ in step \d+, expected finite numbers; it trained on "
            r"(64|80)/\d.png at timestep \d+.*; the weights are still those of step \d+")
    with pytest.raises(ConfigError, match=said) as caught:
        go(setup, tmp_path / "run")
    message, last = caught.value.message, events(tmp_path / "run")[-1]
    assert last["event"] == "checkpoint" and message.endswith(f" of step {last['step']}")
    assert caught.value.hint == (f"try a smaller learning rate (--lr), with --resume, which continues from step "
                                 f"{last['step']}, and --from if that already diverges")


def test_where_layers_have_a_rate_of_their_own_the_hint_names_it(make, setup_of, tmp_path):
    """A smaller --lr would not change that of these layers."""
    layers = [{"match": "to_q", "lr": 100.0}, {"match": "to_k", "rank": 2}]
    for rules, told in ((layers, "try a smaller learning rate (lr in lora.layers for the layers that have one there, "
                         "--lr for the others)"), (layers[1:], "try a smaller learning rate (--lr)")):
        setup = setup_of(make(), **QUICK, lora={"rank": 2, "layers": rules})
        progress = Progress(device=torch.device("cpu"), done=3)
        assert failures.explanation(failures.NotFinite(float("nan"), 1.0, ()), setup, tmp_path, progress).hint == told


def test_a_longer_run_goes_on_from_a_finished_one(make, setup_of, tmp_path):
    made = make()
    go(setup_of(made, **{**QUICK, "steps": 4}, lora={"rank": 2}), tmp_path / "long")
    go(setup_of(made, **{**QUICK, "steps": 6}, lora={"rank": 2}), tmp_path / "long", resume=True)
    go(setup_of(made, **{**QUICK, "steps": 6}, lora={"rank": 2}), tmp_path / "straight")
    assert tensors(tmp_path / "long" / "lora.safetensors") == tensors(tmp_path / "straight" / "lora.safetensors")


def test_bfloat16_trains_beside_a_frozen_base_of_half_the_memory(make, setup_of, tmp_path):
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 2}, precision="bf16", lora={"rank": 2})
    go(setup, tmp_path / "run")
    with safe_open(tmp_path / "run" / "lora.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118


def kept(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


class NoPower(BaseException):
    """Nothing is saved after it."""


def test_a_run_that_was_killed_logs_no_step_twice(make, setup_of, tmp_path):
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 6}, lora={"rank": 2}, checkpoint={"every": 2})

    def die(event):
        if event["event"] == "step" and event["step"] == 4:
            raise NoPower

    with pytest.raises(NoPower):
        go(setup, tmp_path / "run", watch=die)
    assert kept(tmp_path / "run") == ["step-000002"]
    go(setup, tmp_path / "run", resume=True)
    assert [event["step"] for event in events(tmp_path / "run") if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("last", ["checkpoint", "validation", "sample"])
def test_what_a_stop_left_out_after_a_checkpoint_is_made_up_for(make, setup_of, tmp_path, last):
    """Stopped between a checkpoint and its validation or pictures: the log tells what that of a whole run tells."""
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 4, "lora": {"rank": 2}, "checkpoint": {"every": 2, "copy_gib": 0.0},
                              "validation": {"every": 2, "timesteps": 1},
                              "sample": {"every": 2, "steps": 1, "size": [64, 64]}})
    go(setup, tmp_path / "whole")

    def die(event):
        if event["event"] == last and event["step"] == 2:
            raise NoPower

    with pytest.raises(NoPower):
        go(setup, tmp_path / "broken", watch=die)
    go(setup, tmp_path / "broken", resume=True)
    told = [[{name: value for name, value in event.items() if name not in ("seconds", "wait", "samples_per_second")}
             for event in events(tmp_path / run) if event["event"] != "start"] for run in ("whole", "broken")]
    assert told[0] == told[1]
    assert [event["event"] for event in told[0] if event["step"] == 2] == ["step", "checkpoint", "validation", "sample"]
    for step in (0, 2, 4):
        name = f"samples/step-{step:06d}.png"
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()


def test_a_damaged_row_costs_no_step_that_was_made(make, setup_of, tmp_path, monkeypatch):
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 6}, lora={"rank": 2})
    gather, calls = loop.accumulate, []

    def fail_fourth(*args):
        calls.append(args)
        if len(calls) == 4:
            raise CacheError("a row is damaged")
        return gather(*args)

    monkeypatch.setattr(loop, "accumulate", fail_fourth)
    with pytest.raises(CacheError, match="a row is damaged"):
        go(setup, tmp_path / "run")
    assert kept(tmp_path / "run") == ["step-000003"]


@pytest.mark.few("row")
@pytest.mark.parametrize(("error", "said"), [
    (torch.OutOfMemoryError("CUDA out of memory"), "too little memory"),
    (CacheError("a row is damaged"), "a row is damaged"),
    (RuntimeError("shapes differ"), "RuntimeError: shapes differ")], ids=["memory", "row", "bug"])
def test_a_failure_of_validation_is_a_warning(make, setup_of, tmp_path, monkeypatch, error, said):
    made = make()
    plain = {**QUICK, "steps": 4, "lora": {"rank": 2}, "ema": {"decay": 0.9}}
    go(setup_of(made, **plain), tmp_path / "plain")
    setup = setup_of(made, **{**plain, "validation": {"every": 2}})
    validate, calls = evaluate.validate, []

    def fail_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return validate(*args)

    monkeypatch.setattr(evaluate, "validate", fail_second)
    go(setup, tmp_path / "run")
    found = [(event["event"], event["step"]) for event in events(tmp_path / "run")
             if event["event"] in ("validation", "warning")]
    assert found == [("validation", 0), ("warning", 2), ("validation", 4)]
    assert f"no validation: {said}" in [event.get("text") for event in events(tmp_path / "run")]
    assert tensors(tmp_path / "plain" / "lora.safetensors") == tensors(tmp_path / "run" / "lora.safetensors")


def test_after_ctrl_c_nothing_else_is_begun(make, setup_of, tmp_path):
    """A checkpoint, and no validation or pictures that one would have to wait for."""
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 4, "validation": {"every": 1}}, lora={"rank": 2})
    with pytest.raises(KeyboardInterrupt):
        go(setup, tmp_path / "run", watch=interrupt_after(2))
    assert [event["event"] for event in events(tmp_path / "run")] == [
        "start", "validation", "step", "validation", "step", "checkpoint", "stopped"]


@pytest.mark.parametrize("numbers", [
    ["SIGTERM"] * 3, ["SIGINT", "SIGINT"], ["SIGINT", "SIGTERM"], ["SIGTERM", "SIGINT"], ["SIGUSR1", "SIGTERM"],
    ["SIGHUP"] * 2], ids="+".join)
def test_signals_of_one_moment_ask_once(monkeypatch, numbers):
    """As a scheduler and torchrun send them."""
    if not all(hasattr(signal, name) for name in numbers):
        pytest.skip("this system has no such signal")
    monkeypatch.setattr(heart.time, "monotonic", lambda: 1000.0)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in heart.STOPPING}  # nohup ignores one of them
    try:
        stop = threading.Event()
        with heart.set_by_signals(stop):
            assert not stop.is_set()
            for name in numbers:
                signal.raise_signal(getattr(signal, name))
                assert stop.is_set()
        assert {signal.getsignal(number) for number in heart.STOPPING} == {signal.SIG_DFL}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no such signal")
def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = threading.Event()
        with heart.set_by_signals(stop):
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_after_a_request_to_stop_asks_for_the_same():
    """It does not insist, which would lose the step."""
    stop = threading.Event()
    with heart.set_by_signals(stop):
        stop.set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()


def test_only_ctrl_c_insists(monkeypatch):
    clock, survived = [1000.0], []
    monkeypatch.setattr(heart.time, "monotonic", lambda: clock[0])
    with pytest.raises(KeyboardInterrupt), heart.set_by_signals(threading.Event()):
        signal.raise_signal(signal.SIGTERM)
        clock[0] += heart.AGAIN
        signal.raise_signal(signal.SIGTERM)  # whoever sent it will send SIGKILL
        survived.append(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        survived.append(signal.SIGINT)
    assert survived == [signal.SIGTERM]


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing_running(make, setup_of, tmp_path, monkeypatch):
    monkeypatch.setattr(heart, "AGAIN", 0.0)
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 4}, lora={"rank": 2})

    def twice(event):
        if event["event"] == "step" and event["step"] == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        go(setup, tmp_path / "run", watch=twice)
    assert kept(tmp_path / "run") == [] and signal.getsignal(signal.SIGINT) is before
    assert not any(thread.name == "batches" for thread in threading.enumerate())
    go(setup, tmp_path / "run")  # without a checkpoint it begins again


def test_a_resume_in_another_dtype_says_so(make, setup_of, tmp_path):
    """As that of a run with `auto` that began on a GPU and goes on without one."""
    made = make()
    go(setup_of(made, **{**QUICK, "steps": 1}), tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    assert events(tmp_path / "run")[0]["dtype"] == "float32"
    log.write_text(log.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    go(setup_of(made, **{**QUICK, "steps": 2}), tmp_path / "run", resume=True)
    go(setup_of(made, **{**QUICK, "steps": 3}), tmp_path / "run", resume=True)
    assert [event["text"] for event in events(tmp_path / "run") if event["event"] == "warning"] == [
        "forward passes are now computed in float32, and were in bfloat16: precision is 'fp32', and this device is cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_resume_by_another_number_of_processes_says_what_dropout_does(make, setup_of, tmp_path, dropout):
    made, lora = make(), {"rank": 2, "dropout": dropout}
    go(setup_of(made, **{**QUICK, "steps": 1}, lora=lora), tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text().replace('"ranks": 1', '"ranks": 2'))
    go(setup_of(made, **{**QUICK, "steps": 2}, lora=lora), tmp_path / "run", resume=True)
    assert [event["text"] for event in events(tmp_path / "run") if event["event"] == "warning"] == [
        "the number of processes is 1, and was 2: dropout draws differ, so the steps are not those that one number "
        "would have made"] * bool(dropout)


def test_a_picture_that_cannot_be_written_is_a_warning(make, setup_of, tmp_path, monkeypatch):
    made = make()
    setup = setup_of(made, **{**QUICK, "steps": 2, "sample": {"every": 1, "steps": 2, "size": [64, 64]}},
                     lora={"rank": 2})

    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(evaluate, "write_atomic", full)
    go(setup, tmp_path / "run")
    warnings = [event["text"] for event in events(tmp_path / "run") if event["event"] == "warning"]
    assert len(warnings) == 3 and all("no sample pictures: [Errno 28] No space left" in text for text in warnings)


def test_values_that_are_not_finite_are_found_before_the_update(make, setup_of, tmp_path, monkeypatch):
    """The weights stay those of the last good step, and that step is kept."""
    setup = setup_of(make(), **{**QUICK, "steps": 6}, lora={"rank": 2})
    go(setup_of(make(), **{**QUICK, "steps": 2}, lora={"rank": 2}), tmp_path / "good")
    gather, calls = loop.accumulate, []

    def infinite(trainee, *args):
        found = gather(trainee, *args)
        calls.append(found)
        if len(calls) == 3:
            next(iter(trainee.denoiser.parameters.values())).grad.fill_(float("inf"))
        return found

    monkeypatch.setattr(loop, "accumulate", infinite)
    with pytest.raises(ConfigError, match=r"loss is .* and the gradient norm (inf|nan) in step 3, "
                                          "expected finite numbers"):
        go(setup, tmp_path / "run")
    assert kept(tmp_path / "run") == ["step-000002"]
    assert tensors(tmp_path / "run" / "checkpoints" / "step-000002" / "lora.safetensors") == tensors(
        tmp_path / "good" / "checkpoints" / "step-000002" / "lora.safetensors")
    assert [event["step"] for event in events(tmp_path / "run") if event["event"] == "step"] == [1, 2]


def test_a_row_that_is_not_finite_is_named(make, setup_of, tmp_path, monkeypatch):
    setup = setup_of(make(), **{**QUICK, "steps": 1}, lora={"rank": 2})
    fill = Rows.fill

    def spoiled(self, out, field, array, refs, targets=None):
        fill(self, out, field, array, refs, targets)
        if field == "text":
            out[:, 0, 0] = float("nan")

    monkeypatch.setattr(Rows, "fill", spoiled)
    with pytest.raises(CacheError) as caught:
        go(setup, tmp_path / "run")
    assert caught.value.message.startswith("step 1 cannot be trained: NaN or infinite values in the text row of ")
    assert "(shard " in caught.value.message
    assert re.search(r"verify all rows and re-encode these, run prep encode .* --recheck --cache ", caught.value.hint)


@pytest.mark.parametrize(("error", "settings", "hint"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), {},
     "--resume continues from step 2: --micro-batch 1 or --set gradient_checkpointing=true"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
     {"micro_batch": 1, "gradient_checkpointing": True},
     "--resume continues from step 2: --precision bf16 (in another RUN)"),
    (MemoryError(), {"micro_batch": 1, "method": "full"},
     "--resume continues from step 2: --set gradient_checkpointing=true or --set full.dtype=bfloat16 (in another RUN)"),
], ids=["cuda", "cpu", "python"])
def test_too_little_memory_has_its_own_exit_code(make, setup_of, tmp_path, monkeypatch, error, settings, hint):
    setup = setup_of(make(), **{**QUICK, "steps": 4, **settings}, lora={"rank": 2})
    gather, calls = loop.accumulate, []

    def too_large(*args):
        found = gather(*args)
        calls.append(found)
        if len(calls) == 3:
            raise error
        return found

    monkeypatch.setattr(loop, "accumulate", too_large)
    with pytest.raises(OutOfMemoryError) as caught:
        go(setup, tmp_path / "run")
    assert re.fullmatch(r"cpu ran out of memory in step 3, with \d samples of (64x64|80x48) in a forward pass",
                        caught.value.message)
    assert caught.value.exit_code == 9 and caught.value.hint == hint
    assert kept(tmp_path / "run") == ["step-000002"]


@pytest.mark.parametrize(("device", "settings", "hint"), [
    ("cuda", {}, "--set offload=auto or --set quantization=fp8 or nf4 (in another RUN)"),
    ("cuda", {"gradient_checkpointing": False},
     "--set offload=auto --set gradient_checkpointing=true or --set quantization=fp8 or nf4 (in another RUN)"),
    ("cuda", {"offload": 4, "quantization": "fp8"}, "--set offload=auto or a device with more memory"),
    ("cuda", {"offload": "auto"}, "--set quantization=fp8 or nf4 (in another RUN) or a device with more memory"),
    ("cuda", {"method": "full"}, "--set full.dtype=bfloat16 (in another RUN)"),
    ("cuda", {"method": "full", "full": {"dtype": "bfloat16"}}, "--method lora (in another RUN)"),
    ("mps", {}, "--set quantization=fp8 or nf4 (in another RUN) or a device with more memory")], ids=str)
def test_blocks_in_system_memory_help_where_the_device_has_its_own(tmp_path, device, settings, hint):
    setup = SimpleNamespace(config=parse({"gradient_checkpointing": True, **settings}, "x"))
    progress = Progress(device=torch.device(device))
    error = failures.explanation(torch.OutOfMemoryError(), setup, tmp_path, progress)
    assert error.message == f"{device} has too little memory for the model" and error.hint == hint


@pytest.mark.parametrize(("saved", "world", "planned", "samples", "hint"), [
    (0, 1, 8, 8, "--micro-batch 4"), (0, 1, 8, 3, "--micro-batch 2"), (0, 4, 8, 2, "--micro-batch 4"),
    (6, 4, 8, 2, "--micro-batch 1"), (6, 2, 8, 4, "--micro-batch 2"), (6, 1, 8, 8, "--micro-batch 4"),
    (6, 4, 4, 1, ""), (0, 4, 4, 1, ""), (6, 4, 4, 2, "--micro-batch 1")])
def test_the_micro_batch_that_makes_passes_smaller(tmp_path, saved, world, planned, samples, hint):
    """A new run divides a smaller micro-batch among the ranks. A resumed one keeps its plan, and only takes a
    rank's part of each micro-batch in several passes, of at most so many samples."""
    config = parse({"batch_size": 8, "micro_batch": planned, "gradient_checkpointing": False}, "x")
    setup = SimpleNamespace(config=config, manifest=SimpleNamespace(shapes=[((64, 64), ())]),
                            index=SimpleNamespace(samples=SimpleNamespace(bucket=[0])))
    progress = Progress(done=saved, saved=saved, world=world, device=torch.device("cpu"),
                        draws=(SimpleNamespace(sample=0),) * samples)
    found = failures.explanation(MemoryError(), setup, tmp_path, progress).hint
    assert re.findall(r"--micro-batch \d", found) == ([hint] if hint else [])


def test_a_kernel_of_attention_that_takes_no_masks(make, setup_of, tmp_path):
    setup = setup_of(make(), **QUICK)
    error = ValueError("`attn_mask` is not supported for flash-attn 2.")
    progress = Progress(device=torch.device("cpu"))
    assert failures.explanation(error, setup, tmp_path, progress) is error
    chosen = replace(setup, config=replace(setup.config, attention="flash"))
    found = failures.explanation(error, chosen, tmp_path, progress)
    assert isinstance(found, ConfigError) and found.message == (
        "attention is 'flash', which takes no masks, but texts of one forward pass have different lengths here")
    assert "attention=native" in found.hint


def test_too_little_memory_for_the_model(make, setup_of, tmp_path, monkeypatch):
    setup = setup_of(make(), **QUICK)
    monkeypatch.setattr(loop, "create_state", lambda *args, **_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(OutOfMemoryError, match="cpu has too little memory for the model") as caught:
        go(setup, tmp_path / "run")
    assert caught.value.hint == "--precision bf16 (in another RUN)" and not (tmp_path / "run").exists()


def test_a_failure_of_sampling_never_ends_a_run(make, setup_of, tmp_path, monkeypatch):
    setup = setup_of(make(), **{**QUICK, "steps": 2, "sample": {"every": 1}})
    monkeypatch.setattr(evaluate, "pictures",
                        lambda *args, **named: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    go(setup, tmp_path / "run")
    texts = [event["text"] for event in events(tmp_path / "run") if event["event"] == "warning"]
    assert texts == ["no sample pictures: RuntimeError: shapes differ"] * 3


def test_a_runtime_error_in_a_step_stays_what_it_is_and_keeps_the_steps(make, setup_of, tmp_path, monkeypatch):
    setup = setup_of(make(), **{**QUICK, "steps": 4}, lora={"rank": 2})
    clip, calls = update.clip_gradients, []

    def fail_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("shapes differ")
        return clip(*args)

    monkeypatch.setattr(update, "clip_gradients", fail_third)
    with pytest.raises(RuntimeError, match="shapes differ"):
        go(setup, tmp_path / "run")
    assert kept(tmp_path / "run") == ["step-000002"]


def test_a_full_disk_says_where_the_run_goes_on(make, setup_of, tmp_path, monkeypatch):
    setup = setup_of(make(), **{**QUICK, "steps": 4}, lora={"rank": 2}, checkpoint={"every": 2})
    real, calls = saver.save, []

    def full(*args):
        calls.append(args)
        if len(calls) > 1:
            raise OSError(28, "No space left on device", "x")
        return real(*args)

    monkeypatch.setattr(saver, "save", full)
    with pytest.raises(CacheError, match=r"x: No space left on device \(run .*run, after step 4\)") as caught:
        go(setup, tmp_path / "run")
    assert caught.value.hint == "free some space and add --resume to continue from step 2"


def test_a_smaller_micro_batch_goes_on_with_the_same_steps(make, setup_of, tmp_path):
    """After a lack of memory: the samples and draws of each step are those that were planned."""
    made = make()
    setup = setup_of(made, **{**QUICK, "micro_batch": 4, "steps": 4}, lora={"rank": 2})
    go(setup, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        go(setup, tmp_path / "cut", watch=interrupt_after(2))
    smaller = check(RunRequest(manifest=made.path), parse({**QUICK, "micro_batch": 1, "steps": 4, "precision": "fp32",
                                                           "lora": {"rank": 2}}, "x"), planned=4).setup
    go(smaller, tmp_path / "cut", resume=True)
    one, other = (tensors(tmp_path / name / "lora.safetensors") for name in ("straight", "cut"))
    assert all(torch.allclose(torch.tensor(value), torch.tensor(other[name]), atol=1e-5) for name, value in one.items())


def test_a_model_that_changes_while_it_is_loaded(make, setup_of, tmp_path, tiny_model):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    setup = setup_of(make(model=model), **QUICK)
    path = model / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "beta_end": 0.013}))
    with pytest.raises(ModelError, match=r"model changed while it was loaded: it is denoiser \w{12}, scheduler \w{12}, "
                                         r"and was denoiser"):
        go(setup, tmp_path / "run")


@pytest.mark.slow
def test_the_loop_never_loads_a_text_encoder():
    code = ("import sys, train.loop\n"
            "assert not {'prep.models.text.encoder', 'train.sampling.text'} & set(sys.modules)\n"
            "assert 'transformers.models.clip.modeling_clip' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_resumed_run_removes_what_was_to_be_removed(make, setup_of, tmp_path):
    """The one before ended between its last checkpoint and the removal of its oldest, and before its result."""
    settings, made = {**QUICK, "steps": 3, "ema": {"snapshots": True}}, make()
    go(setup_of(made, **{**settings, "checkpoint": {"every": 1, "keep": 3}}), tmp_path / "run")
    (tmp_path / "run" / "lora.safetensors").unlink()
    go(setup_of(made, **{**settings, "checkpoint": {"every": 1, "keep": 1}}), tmp_path / "run", resume=True)
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["step-000003"]
    assert {path.name for path in (tmp_path / "run" / "averages").iterdir()} == {"step-000001", "step-000002"}
    assert (tmp_path / "run" / "lora.safetensors").is_file()
