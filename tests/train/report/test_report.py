"""`train report`: what a page says of runs that ended, were stopped or killed, resumed, or have no pictures."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import time
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from PIL import Image
from report_pages import TEXTS, Outline
from run_pages import SIZES, STEPS, run_html, told, write_grids
from runs import go

from prep.fs.place import Local
from prep.pages.snapshot import EmbeddedPictures
from prep.runs.events import read_events
from prep.runs.grids import columns_of, cut_grid
from prep.runs.heartbeat import NAME, Heartbeat, boot_id
from prep.runs.history import read_history
from train.report.page import write_report
from train.report.pictures import films
from train.sampling.grid import grid_png

QUICK = {"steps": 4, "batch_size": 4, "micro_batch": 4, "validation": {"every": 2, "timesteps": 2}, "lora": {"rank": 2},
         "sample": {"every": 2, "steps": 1, "size": [64, 64]}, "checkpoint": {"every": 2}}
PLAIN = {"validation": {"every": 0}, "sample": {"every": 0}}
WORDS = [f"word {number}" for number in range(TEXTS)]


@pytest.fixture
def report(train, make, setup_of, tmp_path):
    """`report()` trains a run and returns it with the text of its page; settings are arguments."""
    def made(**settings):
        go(setup_of(make(), **{**QUICK, **settings}), tmp_path / "run")
        result = train("report", tmp_path / "run", "--json")
        assert result.code == 0, result.err
        return tmp_path / "run", (tmp_path / "run" / "report.html").read_text(encoding="utf-8"), result.json

    return made


def test_a_finished_run(report):
    run, text, document = report()
    words = Outline(text).words
    assert "Finished: 4 of 4 steps" in words and "Nothing left to do. The result is lora.safetensors" in words
    assert "lowest validation loss (step " in words and "training time" in words and "1 is typical." in words
    assert (document["status"], document["step"], document["steps"], document["prompts"]) == ("finished", 4, 4, 2)
    facts = json.loads((run / "run.json").read_text())
    for digest in (facts["manifest_digest"], *facts["base"].values()):
        assert digest in words.replace("\n", "")
    state = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())
    assert all(each["sha256"] in words for each in state["files"].values())
    assert text.count('class="plot"') == 4 and text.count('<figure class="film">') == 2
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)  # sorts tables
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in text and text.count("<script") == 1
    assert "a red circle" in words and text.count("step 2</span>") == 2
    losses = [event["loss"] for event in read_events(run / "log.jsonl") if event["event"] == "validation"]
    assert document["lowest"]["loss"] == min(losses) and document["validation"] == losses[-1]
    assert document["worst"] > 0 and text.count('<li class="card') == document["worst"]


def test_without_validation_and_sample_pictures(report):
    _, text, document = report(**PLAIN)
    words = Outline(text).words
    assert "No validation loss: no sample is held out, or validation.every is 0." in words
    assert "The run has no sample pictures: sample.every is 0." in words
    assert (document["validation"], document["lowest"], document["prompts"]) == (None, None, 0)


def test_a_run_that_goes_on_or_was_killed(report, train):
    run, _, _ = report(**PLAIN)
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    (run / "log.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    (run / "lora.safetensors").unlink()
    document = train("report", run, "--json").json
    assert (document["status"], document["step"]) == ("open", 2)
    text = (run / "report.html").read_text()
    assert "Running, or killed: 2 of 4 steps" in text and "If it is still running, make this page again" in text
    assert "run the same train run command again, with --resume." in text
    now = time.time()
    beat = Heartbeat(token="a", pid=os.getpid(), host=os.uname().nodename, boot=boot_id(), start="", time=now,
                     phase="training", since=now, step=2, stepped=now)
    for other, said in (({}, "Running: 2 of 4 steps"), ({"ended": "no memory"}, "Failed: 2 of 4 steps"),
                        ({"host": "gpu-7", "time": 0.0}, "Running, or killed: 2 of 4 steps")):
        (run / NAME).write_bytes(replace(beat, **other).spell())
        assert train("report", run).code == 0 and said in (run / "report.html").read_text()
    shutil.rmtree(run / "checkpoints")
    assert train("report", run).code == 0
    assert "run the same train run command again; it has no checkpoint yet." in (run / "report.html").read_text()


def test_before_the_first_step_and_without_a_log(report, train):
    run, _, _ = report(**PLAIN)
    shutil.rmtree(run / "checkpoints")
    for name in ("log.jsonl", "losses.bin", "manifest.json"):
        (run / name).unlink()
    document = train("report", run, "--json").json
    assert (document["status"], document["step"], document["steps"], document["loss"]) == ("open", 0, None, None)
    words = Outline((run / "report.html").read_text()).words
    assert "The log has no steps yet." in words and "has no losses of samples in" in words


def test_a_manifest_that_has_moved(report, train):
    run, _, document = report(**PLAIN)
    there = run.parent / "m.json"
    there.rename(run.parent / "moved.json")
    assert train("report", run, "--json").json["worst"] == document["worst"]  # by the run's own copy
    (run / "manifest.json").unlink()
    assert train("report", run, "--json").json["worst"] == 0
    assert "is gone: " in (run / "report.html").read_text()
    wrong = train("report", run, "--manifest", run.parent / "nowhere.json")
    assert wrong.code == 4 and f"cannot read manifest {run.parent / 'nowhere.json'}: No such file" in wrong.err
    again = train("report", run, "--json", "--manifest", run.parent / "moved.json").json
    assert again["worst"] == document["worst"]


def test_a_resumed_run_has_marks(tmp_path):
    text = run_html(WORDS, tmp_path)
    assert text.count('<line class="mark"') == 4, "one for each chart"
    history = read_history(told(WORDS))
    assert history.starts == [0, STEPS // 2] and history.lowest == (STEPS, 0.5 / STEPS)
    assert history.seconds == pytest.approx(STEPS / 2) and history.samples == 8 * STEPS
    assert len(history.warnings) == TEXTS


def test_a_stopped_run():
    events = told(WORDS)
    stopped = read_history([*events[:-1], {"event": "stopped", "step": STEPS}])
    assert stopped.status == "stopped" and read_history(events[:-1]).status == "open"
    resumed = read_history([*events[:-1], {"event": "stopped", "step": STEPS}, events[0]])
    assert resumed.status == "open"


def test_values_of_other_types_are_left_out():
    strange = [{"event": "step", "step": 1, "loss": "high", "lr": None, "seconds": True, "samples": float("nan")},
               {"event": "sample", "step": 1, "picture": 3}, {"event": "validation", "step": 1, "loss": None},
               {"event": "sample", "step": 1, "picture": "samples/x.png", "sizes": [[1, 2, 3]], "prompts": "no"},
               {"event": "start", "step": 0, "steps": -5, "ranks": "two"}]
    found = read_history(strange)
    assert not any(found.curves.values()) and not found.validations and found.steps == 0 and found.seconds == 0
    assert [(grid.sizes, grid.prompts) for grid in found.grids] == [((), ())]


def test_pictures_are_cut_from_their_grid():
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 256, (high, wide, 3), np.uint8) for wide, high in SIZES]
    sheet = np.asarray(Image.open(io.BytesIO(grid_png(made, ["a", "b", "c"], columns_of(3)))))
    for cut, original in zip(cut_grid(sheet, SIZES), made, strict=True):
        assert (cut == original).all()
    assert cut_grid(sheet[1:], SIZES) == [] and cut_grid(sheet, ()) == []
    large = [np.zeros((8, 200, 3), np.uint8)]
    sheet = np.asarray(Image.open(io.BytesIO(grid_png(large, ["x"], 1))))
    assert cut_grid(sheet, [(200, 8)])[0].shape == (8, 200, 3)


def test_grids_that_are_not_there_or_not_known(tmp_path):
    events = told(WORDS)
    write_grids(tmp_path, events)
    history = read_history(events)
    (tmp_path / history.grids[0].picture).unlink()
    (tmp_path / history.grids[1].picture).write_bytes(b"no picture")
    unknown = replace(history.grids[2], prompts=(), sizes=())
    outside = replace(history.grids[3], picture="../samples/step-000040.png")
    found, note = films(tmp_path, [*history.grids[:2], unknown, outside], EmbeddedPictures())
    assert [(film.prompt, [frame.step for frame in film.frames]) for film in found] == [("", [30])]
    assert note == "3 files of sample pictures cannot be read."


def test_of_many_pictures_some_are_shown(tmp_path):
    events = [{"event": "sample", "step": step, "picture": f"samples/{step}.png", "sizes": [list(SIZES[0])] * 30,
               "prompts": [f"prompt {number // 2}" for number in range(30)]} for step in range(40)]
    (tmp_path / "samples").mkdir()
    data = grid_png([np.zeros((64, 96, 3), np.uint8)] * 30, events[0]["prompts"], columns_of(30))
    for step in range(40):
        (tmp_path / "samples" / f"{step}.png").write_bytes(data)
    found, note = films(tmp_path, read_history(events).grids, EmbeddedPictures())
    assert len(found) == 24 and [frame.step for frame in found[0].frames][::11] == [0, 39]
    assert note == ("12 of 40 steps with pictures are shown, evenly spread; all are in samples. "
                    "24 of 30 prompts are shown.")


def test_nothing_but_an_earlier_page_is_replaced(report, train, tmp_path):
    run, text, _ = report(**PLAIN)
    (tmp_path / "mine.html").write_text("mine")
    assert train("report", run, "-o", tmp_path / "mine.html").code == 5
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert train("report", run, "-o", tmp_path / "cache" / "page.html").code == 5
    for name in ("p.pdf", "report.txt", "p"):
        result = train("report", run, "-o", tmp_path / name)
        assert (result.code, result.err) == (
            5, f"error: {tmp_path / name} is not named like an HTML page, expected a name that ends in .html\n"
            f"hint: -o {(tmp_path / name).with_suffix('.html')}; a browser prints that, also as PDF\n")
        assert not (tmp_path / name).exists()
    assert train("report", run, "-o", tmp_path / "page.HTM", "--worst", 0).code == 0
    result = train("report", run, "-o", tmp_path / "page.html", "--worst", 0)
    assert (result.code, result.out) == (0, f"{tmp_path / 'page.html'}\n")
    assert write_report(Local(run), tmp_path / "page.html", date(2024, 2, 29), worst=0).size < len(text)
    missing = train("report", tmp_path / "none")
    assert missing.code == 5 and "does not exist, expected the directory of a run" in missing.err
