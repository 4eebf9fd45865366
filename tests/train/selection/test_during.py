"""`[evaluate] every`: a run that evaluates its checkpoints as it saves them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torchrun import torchrun
from vision_models import build

from prep.pages.run import charts, run_page
from prep.runs.events import read_events
from prep.runs.history import read_history
from prep.runs.state import RunState
from train import evaluate as evaluating
from train.check import check
from train.cli.memory import Fitting
from train.config.load import parse
from train.memory.forecast import PARTS, Forecast, vision_bytes
from train.memory.room import Room
from train.selection import drawn as drawing
from train.selection.kept import Kept
from train.setup import RunRequest
from train.trackers.numbers import numbers

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
        f"of the evaluated checkpoints {end['proposal']['checkpoint'] or 'none'} is proposed: "
        f"{end['proposal']['reason']}; the scores: train evaluate {straight}")


def test_failures_are_warnings_and_evaluate_does_the_rest(root, place, train, monkeypatch):
    """The disk is full at the first checkpoint, and memory at the second."""
    run, calls, put = place / "run", [], Kept.put_picture

    def full(self, key, pixels):
        calls.append(key)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        put(self, key, pixels)

    def large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Kept, "put_picture", full)
        patched.setattr(drawing, "VisionEncoder", large)
        done = train("run", root / "m.json", "-o", run, "--steps", 2, *SMALL, *EVERY)
    assert done.code == 0 and (run / "lora.safetensors").is_file(), done.err
    assert [(event["step"], event["text"]) for event in events(run, "warning")] == [
        (1, f"no evaluation: [Errno 28] No space left on device: '{run / 'evaluation'}'"),
        (2, "no evaluation: too little memory")]
    assert events(run, "evaluation") == [] and "proposal" not in events(run, "end")[0]
    found = train("evaluate", run, "--device", "cpu", "--json")
    assert found.err.startswith("5 pictures drawn") and len(found.json["checkpoints"]) == 2


def test_each_second_checkpoint_and_the_last_with_another_model_and_own_prompts(root, place, train, tiny_model,
                                                                                monkeypatch):
    """Of the first, nothing is kept to be proposed."""
    (place / "stay.txt").write_text("a blue square --n blurry\n")
    (place / "train.toml").write_text(f"""
[evaluate]
every = 2
seeds = 1
neutral = "stay.txt"
embed = "{root / 'vision'}"
[sample]
model = "{shutil.copytree(tiny_model, place / 'turbo')}"
""")
    run, loads, load = place / "run", [], evaluating.load
    monkeypatch.setattr(evaluating, "load", lambda *args, **named: loads.append(args[0]) or load(*args, **named))
    done = train("run", root / "m.json", "-c", place / "train.toml", "-o", run, "--steps", 3, *SMALL[:-6], "--set",
                 "checkpoint.keep=1")
    assert done.code == 0 and loads == [place / "turbo"] * 2, done.err
    assert [(event["step"], event["pictures"], event["drift"] is None) for event in events(run, "evaluation")] == [
        (2, 2, False), (3, 2, False)]
    assert "proposal" not in events(run, "end")[0] and "of the evaluated checkpoints " not in done.err
    nothing_left(monkeypatch)
    found = train("evaluate", run, "--device", "cpu", "--json")
    assert "0 pictures drawn" in found.err and found.json["neutral"] == 2, found.err
    metadata = json.dumps(dict(safe_open(run / "lora.safetensors", "pt").metadata()))
    assert str(root) not in metadata, "results name no path of this computer"


def test_what_is_missing_is_said_before_the_first_step(root, prep, train, place, tiny_model):
    def faults(manifest=root / "m.json", **settings):
        return check(RunRequest(manifest=manifest), parse({"evaluate": {"every": 1, **settings}}, "")).faults

    def refused(fault, code, said, hint):
        assert fault.exit_code == code and said in fault.message, fault.message
        assert hint in fault.hint, fault.hint
        assert fault.hint.endswith("; or evaluate no checkpoint: --set evaluate.every=0"), fault.hint

    assert faults() == () and check(RunRequest(manifest=root / "m.json"), parse({}, "")).setup.vision is None
    assert prep("encode", root / "photos", "--model", tiny_model, "--cache", root / "cache", "-o", root / "bare.json",
                "--resolution", 64, "--step", 32, "--validation", 0.3).code == 0
    (fault,) = faults(root / "bare.json")
    refused(fault, 3, "bare.json has no embeddings of its pictures to compare with", "prep encode SOURCE --embed MODEL")
    done = train("run", root / "bare.json", "-o", place / "run", "--steps", 1, *SMALL, *EVERY)
    assert done.code == 3 and fault.message in done.err and not (place / "run").exists()
    (fault,) = faults(embed=str(build(root / "third-vision", "dinov2", seed=2)))
    refused(fault, 6, " did not make the embeddings of ", "the model that did with --set evaluate.embed, or make them")
    (fault,) = faults(embed="owner/none")
    refused(fault, 6, "model 'owner/none' is neither a directory nor in the local Hub cache", "--download")
    (fault,) = faults(neutral=str(place / "none.txt"))
    refused(fault, 5, f"cannot read prompt file {place / 'none.txt'}", "write the file again, or name another")
    (place / "new.txt").write_text("unheard of\n")
    (fault,) = faults(neutral=str(place / "new.txt"))
    refused(fault, 7, "the cache has no text row of any prompt in ", "store the rows of a prompt file: prep prompts ")


def test_what_an_evaluation_takes_is_forecast(root):
    setup = check(RunRequest(manifest=root / "m.json"), parse({"evaluate": {"every": 1}}, "")).setup
    size = vision_bytes(setup)
    assert size == sum(4 * value.numel() for value in load_file(root / "vision" / "model.safetensors").values())
    assert vision_bytes(replace(setup, vision=None)) == 0
    parts = dict.fromkeys(PARTS, 0) | {"weights": 3 << 30, "activations": 1 << 30}
    room = Room(device=None, name="a GPU", libraries=0, free=8 << 30, total=8 << 30)
    for vision, said in ((2 << 30, 1), (1 << 30, 0), (0, 0)):
        lines = Fitting(forecast=Forecast(parts=parts, room=room, settings={}), vision=vision).lines
        assert ["note: evaluating a checkpoint takes 5.0 GiB, with the vision model (2.0 GiB), and what its passes need"
                ] * said == lines[1:]


def test_the_log_s_scores_are_curves_and_numbers_of_trackers():
    scores = {"held_out": 0.75, "training": 0.5, "nearest": 0.9, "drift": None, "copies": 1, "pictures": 8,
              "prompt_fit": 0.25}
    log = [{"event": "start", "step": 0, "steps": 4}, {"event": "evaluation", "step": 2, **scores},
           {"event": "evaluation", "step": 4, **scores, "drift": 0.25, "held_out": "high"}]
    history = read_history(log)
    assert history.scores == {"held_out": [(2, 0.75)], "training": [(2, 0.5), (4, 0.5)], "drift": [(4, 0.25)],
                              "prompt_fit": [(2, 0.25), (4, 0.25)]}
    drawn = charts(history)
    assert [chart.title for chart in drawn] == ["Likeness of drawn pictures", "Drift of pictures that should stay"]
    assert all(len({trace.kind for trace in chart.traces}) == len(chart.traces) for chart in drawn), "told apart"
    assert len(drawn[0].traces) == 3 and all(trace.dots for trace in drawn[0].traces), "also of one checkpoint"
    assert charts(read_history(log[:1])) == []
    for proposed in ("step-000002", None):
        end = {"event": "end", "step": 4, "result": "x", "proposal": {"checkpoint": proposed, "reason": "y"}}
        page = run_page(read_history([*log, end]), RunState(doing="finished", step=4, beat=None), films=(),
                        films_note="", worst=(), worst_note="")
        assert [each.value for each in page.head.stats if each.label == "proposed checkpoint"] == ["step 2"] * (
            proposed is not None)
    assert dict(numbers(log[1])) == {f"evaluation/{name}": scores[name]
                                     for name in ("held_out", "training", "nearest", "copies", "prompt_fit")}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo on Windows needs another set-up")
@pytest.mark.parametrize("settings", [(), ("--method", "full", "--shard")])
def test_several_processes_draw_and_the_first_one_keeps(root, place, train, monkeypatch, settings):
    run = place / "run"
    done = torchrun(2, "run", root / "m.json", "-o", run, "--steps", 2, *SMALL, *EVERY, *settings, "--quiet")
    assert done.returncode == 0 and events(run, "warning") == [], done.stderr
    assert [event["step"] for event in events(run, "evaluation")] == [1, 2]
    found = train("evaluate", run, "--device", "cpu", "--json")
    assert found.err.startswith("0 pictures drawn"), found.err
    assert found.json["proposal"] == events(run, "end")[0]["proposal"]


def test_keys_name_what_decides_pictures_and_nothing_else(root):
    """So the base model's stay those of a run that goes on with other settings of training."""
    def keys(device="cpu", **settings):
        given = {"precision": "fp32", **settings}
        report = check(RunRequest(manifest=root / "m.json"), parse(given, ""))
        assert report.faults == ()
        setup = report.setup
        return drawing.column(None, setup, setup.config.sample, drawing.seeded(drawing.no_prompt(setup.index), 1, 0),
                              torch.device(device)).keys

    usual = keys()
    assert usual == keys(steps=7, seed=3, optimizer={"lr": 0.5}, evaluate={"every": 1}, checkpoint={"every": 3},
                         ema={"decay": 0.5}, gradient_checkpointing=True, sample={"every": 1})
    others = [keys("xpu"), keys(precision="bf16"), keys(sample={"steps": 3}), keys(sample={"size": [64, 128]}),
              keys(lora={"rank": 3}), keys(method="full"), keys(tf32=True)]
    assert len({usual, *others}) == 1 + len(others)
