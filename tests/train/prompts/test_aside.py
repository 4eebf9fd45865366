"""Prompts edited while training: encoded by another process, never the end of a run, never a text encoder in it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from runs import events, go
from traps import trap

from prep.fs.place import Local
from prep.keys import text_key
from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest
from train import evaluate
from train.check import check
from train.config.load import parse
from train.parallel.ranks import PATIENCE, Ranks
from train.prompts import aside
from train.prompts.aside import encode_aside, kept_rows
from train.sample import SampleRequest, show
from train.sampling.prompts import current
from train.setup import RunRequest

QUICK = {"precision": "fp32", "validation": {"every": 0}, "batch_size": 2, "steps": 2, "lora": {"rank": 2},
         "checkpoint": {"every": 1}}
PICTURES = {"every": 1, "steps": 1, "size": [64, 64]}


@pytest.fixture
def encoded(prep, tiny_model, photos):
    """`encoded(**settings)`: a setup whose prompt file was edited after `prep encode`."""
    (photos.parent / "p.txt").write_text("a red circle\n")
    result = prep("encode", photos, "--model", tiny_model, "--cache", photos.parent / "cache", "-o",
                  photos.parent / "m.json", "--resolution", 64, "--step", 16, "--device", "cpu", "--prompts",
                  photos.parent / "p.txt")
    assert result.code == 0, result.err
    (photos.parent / "p.txt").write_text("a red circle\na green dragon --n blurry --w 64 --h 64\n")

    def setup(**settings):
        report = check(RunRequest(manifest=photos.parent / "m.json"), parse({**QUICK, **settings}, "test"))
        assert report.setup is not None, [fault.message for fault in report.faults]
        return report.setup

    return setup


def warnings_of(run):
    return [event["text"] for event in events(run) if event["event"] == "warning"]


@pytest.mark.slow
def test_an_edited_prompt_is_encoded_and_its_row_is_prep_s(prep, encoded, tmp_path, monkeypatch):
    """By a process that takes no modules from the current directory; `train sample` takes the rows, too."""
    setup = encoded(sample=PICTURES)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    caught = trap(tmp_path / "here")
    go(setup, tmp_path / "run")
    assert warnings_of(tmp_path / "run") == [] and not caught.exists()
    rows = sorted(path.name for path in (tmp_path / "run" / "prompts").iterdir())
    assert len(rows) == 2 and all(name.endswith(".safetensors") for name in rows)
    index = open_index(setup.manifest)
    context = setup.manifest.fields["text"].context
    key = text_key("a green dragon", context)
    (ours,) = kept_rows(tmp_path / "run", index, [key]).values()
    result = prep("prompts", setup.manifest.folder / "p.txt", "--manifest", setup.manifest.path, "--device", "cpu")
    assert result.code == 0, result.err
    again = open_index(read_manifest(setup.manifest.path))
    prompt = current(again).prompts[1]
    wanted = Rows(again).text([prompt.positive])
    assert prompt.prompt == "a green dragon" and ours.keys() == wanted.keys()
    for name, value in ours.items():
        assert value.dtype == wanted[name].dtype
        assert torch.allclose(value.float(), wanted[name].float(), rtol=0.02, atol=0.05)  # of bfloat16
    (tmp_path / "other.txt").write_text("a green dragon --n blurry --w 64 --h 64\n")
    for prompts, count in ((None, 2), (tmp_path / "other.txt", 1)):
        wanted = SampleRequest(run=Local(tmp_path / "run"), which=("after",), steps=1, prompts=prompts)
        shown = show(wanted, torch.device("cpu"), tmp_path / "g.png")
        assert (shown.warnings, len(shown.pictures)) == ((), count)


def test_without_patience_there_is_a_warning_with_the_command(encoded, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("no process")

    monkeypatch.setattr(aside.subprocess, "run", never)
    go(encoded(sample={**PICTURES, "wait": 0}), tmp_path / "run")
    assert len(set(warnings_of(tmp_path / "run"))) == 1 and "prep prompts " in warnings_of(tmp_path / "run")[0]
    assert not (tmp_path / "run" / "prompts").exists()


@pytest.mark.few("result2")
@pytest.mark.parametrize(("result", "said"), [
    (subprocess.TimeoutExpired("x", 3), "that took more than 3 s"),
    pytest.param(OSError(12, "Cannot allocate memory"), "no process could be started: Cannot allocate memory",
                 marks=pytest.mark.slow),
    (SimpleNamespace(returncode=1, stderr="Traceback\nNo \x1b[31mmodel\n"), "No \\x1b[31mmodel"),
    pytest.param(SimpleNamespace(returncode=-9, stderr=""), "exit code -9", marks=pytest.mark.slow)])
def test_a_failure_is_a_warning_and_is_not_tried_again(encoded, tmp_path, monkeypatch, result, said):
    asked = []

    def run(words, **options):
        asked.append((words, options))
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(aside.subprocess, "run", run)
    go(encoded(sample={**PICTURES, "wait": 3}), tmp_path / "run")
    told = warnings_of(tmp_path / "run")
    assert f"no prompt was encoded here: {said}" in told and any("prep prompts " in text for text in told)
    assert len(asked) == 1 and asked[0][1]["timeout"] == 3 and asked[0][1]["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert told.count("no prompt was encoded here: that failed or took too long before; --resume tries it again") == 2
    assert events(tmp_path / "run")[-1]["event"] == "end"
    go(encoded(sample={**PICTURES, "wait": 200}, steps=3), tmp_path / "run", resume=True)
    assert [options["timeout"] for _, options in asked] == [3, 200]


@pytest.mark.parametrize(("world", "wait", "waited", "warns"), [
    (1, 86400, 86400, False), (2, 86400, 3600, True), (2, 3600, 3600, False)])
def test_no_other_rank_waits_in_vain(encoded, tmp_path, monkeypatch, world, wait, waited, warns):
    """They would give up the run after two hours."""
    setup, ranks, asked = encoded(sample={**PICTURES, "wait": wait}), Ranks(rank=0, world=world), []
    monkeypatch.setattr(aside.subprocess, "run", lambda words, **options: (
        asked.append(options["timeout"]) or SimpleNamespace(returncode=0)))
    evaluate._prompts(Rows(open_index(setup.manifest)), setup, tmp_path, ranks.longest)
    assert asked == [waited] and waited < (PATIENCE if world > 1 else 1e6)
    told = evaluate.waits_shortened(setup.config, ranks)
    assert told == (f"sample.wait is {wait} s, but of several processes none waits longer than 3600 s for one that "
                    "encodes prompts" if warns else None)


def test_rows_that_do_not_fit_are_passed_over(encoded, tmp_path):
    setup = encoded(sample=PICTURES)
    index = open_index(setup.manifest)
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "a.safetensors").write_bytes(b"no tensors")
    assert kept_rows(tmp_path, index, ["a", "b"]) == {}
    others = replace(setup, model=replace(setup.model, others={"text": "ab" * 32}))
    assert encode_aside(tmp_path, others, {"a": ("x", False)}) == (
        "the text encoder of the model is not the one that made the cache")
