"""`[evaluate] every`: a run that evaluates its checkpoints as it saves them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file
from vision_models import build

from prep.models.vision.encoder import VisionEncoder
from prep.pages.run import charts
from prep.runs.events import read_events
from prep.runs.history import read_history
from prep.runs.lines import line
from train.selection import drawn as drawing
from train.selection.kept import Kept
from train.trackers.numbers import numbers

SCHEMAS = Path(__file__).parents[3] / "manifests" / "schemas"
SMALL = ("--device", "cpu", "--batch-size", 2, "--set", "lora.rank=2", "--set", "sample.steps=2", "--set",
         "sample.size=[64, 64]", "--set", "sample.every=0", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=0",
         "--set", "validation.every=1", "--lr", 0.05)
EVERY = ("--set", "evaluate.every=1", "--set", "evaluate.seeds=2")


@pytest.fixture
def place(root, tmp_path):
    """A directory beside the manifest."""
    folder = root / tmp_path.name
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def events(run: Path, *kinds: str):
    """The events of these kinds, without what depends on the clock."""
    clock = ("seconds", "wait", "samples_per_second")
    return [{name: value for name, value in event.items() if name not in clock}
            for event in read_events(run / "log.jsonl") if not kinds or event["event"] in kinds]


def files(run: Path, below: str):
    return {path.relative_to(run / below).as_posix(): path.read_bytes()
            for path in (run / below).rglob("*") if path.is_file() and path.name != "state.json"}


def weights(run: Path):
    """All tensors of the checkpoints and the result, without what files say of the settings."""
    return {path.relative_to(run): {name: value.numpy().tobytes() for name, value in load_file(path).items()}
            for path in run.rglob("*.safetensors")}


def nothing_left(monkeypatch):
    """From now on nothing may be drawn or embedded."""
    monkeypatch.setattr(drawing, "load", lambda *_, **__: pytest.fail("a denoiser is loaded"))
    monkeypatch.setattr(drawing, "VisionEncoder", lambda *_, **__: pytest.fail("a vision model is loaded"))


@pytest.mark.parametrize("settings", [
    ("--set", "ema.decay=0.5"),
    pytest.param(("--method", "full"), marks=pytest.mark.slow),
    pytest.param(("--set", "lora.init=pissa"), marks=pytest.mark.slow),
    pytest.param(("--set", "optimizer.name=adamw-schedule-free", "--set", "lora.dropout=0.2"), marks=pytest.mark.slow)])
def test_an_interrupted_run_is_an_unbroken_one_and_evaluate_draws_nothing(root, place, train, monkeypatch, settings):
    def go(name, *words):
        return train("run", root / "m.json", "-o", place / name, "--steps", 2, *SMALL, *settings, *words)

    straight, broken, put, kept = place / "straight", place / "broken", Kept.put_picture, []
    done = go("straight", *EVERY)
    assert done.code == 0, done.err

    def dies(self, key, pixels):
        if len(kept) == 11:  # of the base model 2, of each checkpoint 4 and 2: within the last
            raise KeyboardInterrupt
        kept.append(key)
        put(self, key, pixels)

    with monkeypatch.context() as patched:
        patched.setattr(Kept, "put_picture", dies)
        assert go("broken", *EVERY).code == 130
    assert len(files(broken, "evaluation")) == 11 + 8
    assert go("broken", *EVERY, "--resume").code == 0
    assert [event for event in events(broken) if event["event"] != "start"] == [
        event for event in events(straight) if event["event"] != "start"]
    for below in ("evaluation", "checkpoints"):
        assert files(broken, below) == files(straight, below)
    assert go("plain").code == 0
    assert weights(place / "plain") == weights(straight)
    assert events(place / "plain", "step", "validation") == events(straight, "step", "validation")
    assert (place / "plain" / "losses.bin").read_bytes() == (straight / "losses.bin").read_bytes()

    shutil.rmtree(broken / "evaluation")
    assert train("evaluate", broken, "--device", "cpu").code == 0
    assert files(broken, "evaluation") == files(straight, "evaluation"), "both draw the same bits"
    nothing_left(monkeypatch)
    found = train("evaluate", straight, "--device", "cpu", "--json")
    assert found.code == 0 and "\n0 pictures drawn" in f"\n{found.err}", found.err
    for event, each in zip(events(straight, "evaluation"), found.json["checkpoints"], strict=True):
        names = ("held_out", "training", "nearest", "drift")
        assert [event[name] for name in names] == pytest.approx([each[name] for name in names], abs=1e-5)
        assert (event["step"], event["copies"], event["pictures"]) == (each["step"], len(each["copies"]), 4)
    end, = events(straight, "end")
    assert end["proposal"] == found.json["proposal"]
    assert done.err.splitlines()[-1] == (
        f"train evaluate {straight} proposes {end['proposal']['checkpoint'] or 'none'}: {end['proposal']['reason']}")
