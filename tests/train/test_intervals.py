"""A run saves, samples and validates by epochs, also when it is resumed with other intervals."""

from __future__ import annotations

import json
import re
import signal
from datetime import date
from fractions import Fraction
from math import ceil

import pytest
from runs import events, go

from prep.errors import ConfigError
from prep.fs.place import Local
from train.check import check
from train.config.load import parse
from train.report.page import write_report
from train.runs import directory as rundir
from train.runs.directory import read_run
from train.runs.resume import compare, find_start
from train.setup import RunRequest

COMMON = {"batch_size": 2, "steps": 10, "lora": {"rank": 2}, "validation": {"every": "0.6 epochs", "timesteps": 1},
          "sample": {"every": "1 epoch", "steps": 1, "size": [64, 64]}, "checkpoint": {"every": "1 epoch", "keep": 0}}


def steps_of(run, kind):
    return [event["step"] for event in events(run) if event["event"] == kind]


def saved(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def test_checkpoints_pictures_and_validations_come_by_epochs(make, setup_of, tmp_path):
    setup, run = setup_of(make(), **COMMON), tmp_path / "run"
    assert setup.plan.steps_per_epoch == 4
    go(setup, run)
    assert saved(run) == steps_of(run, "checkpoint") == [4, 8, 10], "two epochs and the end"
    assert steps_of(run, "sample") == [0, 4, 8, 10]
    assert [path.name for path in sorted((run / "samples").iterdir())] == [
        f"step-{step:06d}.png" for step in (0, 4, 8, 10)]
    assert steps_of(run, "validation") == [0, *(ceil(count * Fraction("2.4")) for count in (1, 2, 3, 4))] == [
        0, 3, 5, 8, 10]
    config = json.loads((run / "run.json").read_text())["config"]
    assert [config[name]["every"] for name in ("validation", "sample", "checkpoint")] == [
        "0.6 epochs", "1 epoch", "1 epoch"]
    assert read_run(Local(run)).config == setup.config
    assert 'checkpoint.every = "1 epoch"' in (run / "README.md").read_text()
    page = write_report(Local(run), None, date(2026, 11, 22), worst=0).path.read_text()
    assert re.search(r"checkpoint\.every.{0,200}1 epoch", page, re.DOTALL)


def test_a_resumed_run_goes_on_at_the_same_steps_or_takes_another_interval(make, setup_of, tmp_path):
    made, run = make(), tmp_path / "run"
    quiet = {**COMMON, "sample": {"every": 0}, "validation": {"every": 0}}

    def stop(event):
        if event["event"] == "step" and event["step"] == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        go(setup_of(made, **quiet), run, watch=stop)
    assert saved(run) == [4, 5]
    other = setup_of(made, **{**quiet, "checkpoint": {"every": "0.5 epochs", "keep": 0}})
    found = compare(find_start(Local(run)), other, adopt=False)
    assert not found.faults and found.notes == ("checkpoint.every is '0.5 epochs', was '1 epoch'",)
    respelled = setup_of(made, **{**quiet, "checkpoint": {"every": "1.0 epochs", "keep": 0}})
    assert compare(find_start(Local(run)), respelled, adopt=False).notes == ()
    go(setup_of(made, **quiet), run, resume=True)
    assert saved(run) == [4, 5, 8, 10], "epochs are counted from the run's beginning"
    go(other, run, resume=True, named="step-000004")
    assert saved(run) == [4, 6, 8, 10]


@pytest.mark.parametrize(("every", "steps", "done", "coming"), [
    ("1 epoch", 10, 0, [4, 8, 10]), ("1 epoch", 12, 0, [4, 8, 12]), ("0.6 epochs", 10, 5, [8, 10]),
    ("0.6 epochs", 11, 4, [5, 8, 10, 11]), (10, 95, 75, [80, 90, 95]), (0, 10, 3, [10]), (3, 9, 9, []), (0, 9, 9, []),
    ("100 epochs", 10, 0, [10])])
def test_the_checkpoints_to_come_are_those_that_are_saved(make, setup_of, every, steps, done, coming):
    setup = setup_of(make(), batch_size=2, steps=steps, checkpoint={"every": every})
    due = setup.interval(every).is_due
    assert [step for step in range(done + 1, steps + 1) if due(step) or step == steps] == coming
    assert rundir._coming(setup, done) == len(coming)


@pytest.mark.few("0.1 epochs")
@pytest.mark.parametrize("every", ["0.1 epochs", "0.249999999999 epochs", "0.000000000001 epochs"])
def test_an_interval_of_less_than_a_step_is_refused(make, train, every):
    made, said = make(), "which ends before a step does, since an epoch has 4 steps; expected 1 step or more"
    report = check(RunRequest(manifest=made.path), parse(
        {"batch_size": 2, "sample": {"every": every}, "checkpoint": {"every": every}}, "x"))
    assert report.setup is None and [type(fault) for fault in report.faults] == [ConfigError] * 2
    assert [fault.message for fault in report.faults] == [
        f"{name} is '{every}', {said}" for name in ("sample.every", "checkpoint.every")]
    for command in ("check", "run"):
        result = train(command, made.path, "--batch-size", 2, "--set", f"validation.every={every}", "-o",
                       made.root / "run")
        assert result.code == 3 and not (made.root / "run").exists()
        assert result.err.endswith(f"validation.every is '{every}', {said}\nhint: --set validation.every=1 for every "
                                   "step, or --set 'validation.every=1 epoch'\n")
    assert train("check", made.path, "--batch-size", 2, "--set", "validation.every=0.25 epochs").code == 0


@pytest.mark.slow
def test_the_summary_says_what_epochs_are_in_steps(make, train):
    made = make()
    told = ("validation every 0.6 epochs (2 or 3 steps), sample pictures every epoch (4 steps), checkpoints every "
            "2 epochs (8 steps)")
    options = ("--batch-size", 2, "--steps", 1, "--set", "validation.every=0.6 epochs", "--set",
               "sample.every=1 epochs", "--set", 'checkpoint.every="2 epochs"')
    assert told in train("check", made.path, *options).out.splitlines()
    result = train("run", made.path, *options, "--rank", 2, "--set", "sample.steps=1", "--device", "cpu", "-o",
                   made.root / "run")
    assert result.code == 0 and told in result.err.splitlines(), result.err
    few = train("check", made.path, "--batch-size", 2, "--set", "checkpoint.every=0.25 epochs").out
    assert "\ncheckpoints every 0.25 epochs (1 step)\n" in f"{few}\n"
    alone = make(validation=0)
    assert "validation every" not in train("check", alone.path, *options).out
    assert "checkpoints every" not in train("check", alone.path).out
