"""`train merge RUN --ema 0.1`: what a run keeps of its weights makes a moving average of any length afterwards."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

from runs import go

from prep.errors import PathError
from prep.fs import atomic
from prep.fs.place import Local
from train.merging.posthoc import PosthocRequest, posthoc, snapshots_of, solve
from train.optim import ema
from train.runs.checkpoint import POWERS
from train.runs.checkpoint_files import remove_old
from train.runs.directory import claim_run
from train.runs.resume import find_start

LENGTHS = (0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25)
QUICK = {"batch_size": 4, "steps": 8, "validation": {"every": 0}, "sample": {"every": 0}, "optimizer": {"lr": 0.01},
         "log": {"plot": False}, "ema": {"snapshots": True}}


def profile(length, step, total):
    """The weight of each of `total` steps in an average of this length at `step`, by the recursion itself."""
    weights = np.zeros(total)
    for each in range(step):
        decay = ema.power_decay_at(each, length)
        weights[:each] *= decay
        weights[each] += 1 - decay
    return weights


def test_a_profile_is_a_power_of_time_of_the_length_that_was_asked_for():
    """Its standard deviation, by sums over small steps; its decays add up to the integral of each step."""
    time = (np.arange(400_000) + 0.5) / 400_000
    for length in LENGTHS:
        power = time ** ema.exponent_of(length)
        power /= power.sum()
        mean = (power * time).sum()
        assert ((power * (time - mean) ** 2).sum()) ** 0.5 == pytest.approx(length, rel=1e-4)
        steps = np.diff((np.arange(501) / 500) ** (ema.exponent_of(length) + 1))
        assert np.allclose(profile(length, 500, 500), steps, atol=1e-12)
    assert ema.exponent_of(0.05) == pytest.approx(16.97, abs=0.01) and ema.exponent_of(0.1) == pytest.approx(
        6.94, abs=0.01), "as the paper has them"
    assert ema.exponent_of(ema.LONGEST) == pytest.approx(0, abs=1e-9) and ema.power_decay_at(0, 0.1) == 0


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("every", [50, 125, 400])
def test_weights_are_those_of_least_squares_over_single_steps(length, every):
    """An independent dozen lines: profiles as vectors of steps, and numpy's least squares, whose sum is made 1."""
    total = 1000
    snapshots = [(step, each) for step in range(every, total + 1, every) for each in POWERS.values()]
    if total % every:
        snapshots += [(total, each) for each in POWERS.values()]
    columns = np.array([profile(each, step, total) for step, each in snapshots]).T
    wanted = profile(length, total, total)
    weights = np.linalg.lstsq(columns, wanted, rcond=1e-7)[0]
    weights /= weights.sum()
    found = solve(snapshots, total, length)
    one, two = (columns @ np.array(each) - wanted for each in (weights, found.weights))
    assert sum(found.weights) == pytest.approx(1) and np.linalg.norm(one - two) < 2e-3 * np.linalg.norm(wanted)
    assert found.error == pytest.approx(np.linalg.norm(two) / np.linalg.norm(wanted), abs=2e-3)
    if length in POWERS.values():
        assert found.error < 1e-5 and max(found.weights) == pytest.approx(1), "one that is there is itself"


def test_a_reconstructed_average_is_the_tracked_one_within_the_error_of_its_profile():
    """Of a random walk of weights, as `WeightAverage` follows it: by Cauchy and Schwarz the difference is at most the
    error of the profile times the walk's norm; with many snapshots it is small beside what the average moved."""
    steps, every = 480, 30
    walk = torch.randn(steps, 64, generator=torch.Generator().manual_seed(0)).double().cumsum(0).float() / 5
    tracked = {length: ema.WeightAverage({"w": torch.zeros(64)}, in_host=False) for length in
               {*LENGTHS, *POWERS.values()}}
    kept = {}
    for step in range(steps):
        for length, average in tracked.items():
            average.update({"w": walk[step]}, ema.power_decay_at(step, length))
        if (step + 1) % every == 0:
            kept |= {(step + 1, each): tracked[each].values["w"].clone() for each in POWERS.values()}
    for length in LENGTHS:
        found = solve(list(kept), steps, length)
        made = sum(weight * value.double() for weight, value in zip(found.weights, kept.values(), strict=True))
        off = (made - tracked[length].values["w"].double()).norm()
        bound = found.error * np.linalg.norm(profile(length, steps, steps)) * float(walk.norm())
        assert off <= 1.1 * bound + 1e-4 and off < 0.03 * walk.std(0).norm(), (length, off, bound)


def in_pieces(file):
    """Replaces a file by pieces with a part of the rows each, as a divided model saves it; one has no row of some."""
    with safe_open(file, "pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    file.unlink()
    file.with_suffix("").mkdir()
    at = {name: [0, half := len(value) // 2, max(half, len(value) - 1), len(value)] for name, value in tensors.items()}
    for number in range(3):
        own = {name: value[at[name][number]:at[name][number + 1]].contiguous() for name, value in tensors.items()
               if at[name][number] < at[name][number + 1]}
        places = {name: {"saved_offsets": [at[name][number], *[0] * (value.ndim - 1)]} for name, value in own.items()}
        save_file(own, file.with_suffix("") / f"shard-{number + 1:05d}-of-00003.safetensors",
                  {**metadata, "DCP_SHARDING_INFO": json.dumps(places)})


@pytest.mark.parametrize("settings", [{"lora": {"rank": 2}}, {"method": "full", "full": {"train": ["attn2"]}}],
                         ids=["lora", "full"])
def test_a_run_keeps_snapshots_of_removed_checkpoints_and_makes_averages_of_them(make, setup_of, train, tmp_path,
                                                                                 settings):
    made, run = make(), tmp_path / "run"
    setup = setup_of(made, **QUICK, **settings, checkpoint={"every": 1, "keep": 0})
    go(setup, tmp_path / "all")
    name = "lora.safetensors" if "lora" in settings else "unet/diffusion_pytorch_model.safetensors"
    walk = [load_file(tmp_path / f"all/checkpoints/step-{step:06d}/{name}") for step in range(1, 9)]
    moved = {each for each in walk[0] if not torch.equal(walk[0][each], walk[-1][each])}
    assert moved and ("lora" in settings or len(moved) < len(walk[0]))
    go(setup_of(made, **QUICK, **settings, checkpoint={"every": 2, "keep": 1}), run)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000008"]
    steps = [f"step-{step:06d}" for step in (2, 4, 6)]
    assert sorted(path.name for path in (run / "averages").iterdir()) == steps
    assert [(each.step, each.length) for each in snapshots_of(run)] == [
        (step, length) for step in (2, 4, 6, 8) for length in (0.05, 0.1)]
    for each in snapshots_of(run):
        found, weights = load_file(each.path), profile(each.length, each.step, 8)
        for tensor, value in found.items():
            wanted = sum(weight * other[tensor].double() for weight, other in zip(weights, walk, strict=True))
            assert torch.allclose(value.double(), wanted, rtol=1e-5, atol=1e-7), (each, tensor)
    told = train("merge", run, "--ema", "0.15", "-o", tmp_path / "mean.safetensors", "--json").json
    solved = solve([(each["step"], each["length"]) for each in json.loads(
        safe_open(tmp_path / "mean.safetensors", "pt").metadata()["latentry.averaged"])], 8, 0.15)
    assert told["ema"] == {"length": 0.15, "step": 8, "error": solved.error} and len(told["parts"]) == 8
    mean, weights = load_file(tmp_path / "mean.safetensors"), profile(0.15, 8, 8)
    for tensor, value in mean.items():
        wanted = sum(weight * other[tensor].double() for weight, other in zip(weights, walk, strict=True))
        far = max(float((other[tensor] - walk[-1][tensor]).norm()) for other in walk)
        assert (value.double() - wanted).norm() <= 3 * solved.error * far + 1e-6, tensor
        assert tensor in moved or torch.equal(value, walk[0][tensor]), "to the bit"
    for file in sorted((run / "averages").glob("*/*.safetensors"))[1:] if "lora" not in settings else ():
        in_pieces(file)
    assert train("merge", run, "--ema", "0.15", "-o", tmp_path / "joined.safetensors").code == 0
    for tensor, value in load_file(tmp_path / "joined.safetensors").items():
        assert torch.equal(value, mean[tensor]), tensor
    with safe_open(tmp_path / "mean.safetensors", "pt") as file:
        said = file.metadata()
    assert said["latentry.weights"] == "power-function average" and said["latentry.seed"] == "0"
    assert json.loads(said["latentry.ema"])["length"] == 0.15 and said["latentry.step"] == "8"
    earlier = train("merge", run / "checkpoints/step-000008", "--ema", "0.1", "-o", tmp_path / "same.safetensors")
    assert earlier.code == 0 and "the average of length 0.1 at step 8, of 8 snapshots, " in earlier.out, earlier.err
    assert "its profile is off by 0.00% of its size\n" in earlier.out
    own = load_file(run / "checkpoints/step-000008/ema-0.10.safetensors")
    assert all(torch.allclose(value, own[each], rtol=1e-5, atol=1e-6) for each, value in load_file(
        tmp_path / "same.safetensors").items())


def test_removing_checkpoints_loses_no_snapshot_wherever_it_stops(tmp_path, monkeypatch):
    wanted = [(step, length) for step in (1, 2, 3) for length in POWERS.values()]
    for last in range(24):
        run, left = tmp_path / str(last), [last]
        for step in (1, 2, 3):
            folder = run / f"checkpoints/step-{step:06d}"
            folder.mkdir(parents=True)
            for name in (*POWERS, "state.json"):
                (folder / name).write_text(name)
            if step == 2:  # as a divided model saves them
                for name in POWERS:
                    (folder / name).rename(folder / "whole")
                    (folder / name).with_suffix("").mkdir()
                    (folder / "whole").rename((folder / name).with_suffix("") / "shard-00001-of-00001.safetensors")

        def stopping(real, left=left):
            def go(*args, **named):
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
                return real(*args, **named)

            return go

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for name in ("make_dirs", "rename", "remove_tree", "remove"):
                patch.setattr(atomic, name, stopping(getattr(atomic, name)))
            remove_old(run, 1)
        assert [(each.step, each.length) for each in snapshots_of(run)] == wanted
        remove_old(run, 1)
        assert [(each.step, each.length) for each in snapshots_of(run)] == wanted
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000003"]
    assert left[0] >= 0, "the last one was not stopped"


def test_snapshots_of_an_abandoned_way_are_set_aside(make, setup_of, tmp_path):
    setup = setup_of(make(), **{**QUICK, "steps": 4}, lora={"rank": 2}, checkpoint={"every": 1, "keep": 2})
    go(setup, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-000003")
    shutil.copytree(tmp_path / "run/averages/step-000002", tmp_path / "run/averages/step-000003")
    shutil.copytree(tmp_path / "run/checkpoints/step-000004", tmp_path / "kept")
    (tmp_path / "run/checkpoints/step-000004").rename(tmp_path / "run/checkpoints/step-000002")
    told = claim_run(Local(tmp_path / "run"), setup, step=2)
    assert "the averages of later steps were set aside: averages/aside-step-000003" in told
    assert sorted(path.name for path in (tmp_path / "run/averages").iterdir()) == [
        "aside-step-000003", "step-000001", "step-000002"]
    assert max(each.step for each in snapshots_of(tmp_path / "run")) == 2


def test_what_has_no_snapshots_is_refused(make, setup_of, train, tmp_path):
    made = make()
    go(setup_of(made, **{**QUICK, "steps": 2, "ema": {}}, lora={"rank": 2}), tmp_path / "run")
    for folder in (tmp_path / "run", tmp_path / "run/checkpoints/step-000002"):
        with pytest.raises(PathError) as caught:
            posthoc(PosthocRequest(run=folder, length=0.1, output=tmp_path / "mean.safetensors"))
        assert caught.value.message == f"{folder} has no snapshots of averages"
        assert caught.value.hint == "train with --set ema.snapshots=true, which keeps them from the first step on"
    on = setup_of(made, **{**QUICK, "steps": 3}, lora={"rank": 2})
    with pytest.raises(Exception, match=r"ema\.snapshots"):  # there would be none of the steps before
        go(on, tmp_path / "run", resume=True)
    assert find_start(Local(tmp_path / "run")).state.step == 2
    for words, message in [
        ((tmp_path / "run", tmp_path / "run", "--ema", "0.1"), "--ema is for one run, but 2 are named"),
        ((tmp_path / "run", "--ema", "0.1", "--strength", "2"), "--strength is for the merge without --ema"),
        ((tmp_path / "run", "--ema", "0.5"), "less than or equal to 0.28")]:
        result = train("merge", *words, "-o", tmp_path / "mean.safetensors")
        assert result.code == 2 and message in result.err, result.err
    for settings, message in [
        (("--shard", "--set", "ema.device=cpu"), "ema.device is 'cpu', which is only for models that are not divided"),
        (("--set", "optimizer.name=adamw-schedule-free"), "ema.snapshots is on, expected off for 'adamw-schedule-f")]:
        result = train("check", made.path, "--set", "ema.snapshots=true", *settings)
        assert result.code and message in result.err, result.err


def test_the_forecast_counts_two_averages(make, setup_of):
    from train.memory.room import room_of
    from train.memory.step import AVERAGE, count

    made = make()
    setup = setup_of(made, **QUICK, lora={"rank": 4})
    taken = count(setup, room_of("auto", 1 << 40))
    assert taken.parts[AVERAGE] == 2 * 4 * setup.model.numbers
