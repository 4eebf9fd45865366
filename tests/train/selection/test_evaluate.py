"""`train evaluate`: what it draws and keeps, how it goes on, and what it says."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from PIL import Image
from vision_models import build, library_rows, library_texts

from prep.embedding.rows import embeddings_of
from prep.fs.place import Local
from prep.manifest.document import Manifest, read_manifest
from prep.manifest.opened import open_manifest
from prep.models.vision.encoder import VisionEncoder
from train.sample import SampleRequest
from train.selection import drawn as drawing
from train.selection import run as running
from train.selection.kept import Kept
from train.selection.run import EvaluateRequest

SCHEMA = json.loads((Path(__file__).parents[3] / "manifests" / "schemas" / "evaluate.schema.json").read_text())
SMALL = ("--device", "cpu", "--quiet", "--batch-size", 2, "--set", "lora.rank=2", "--set", "sample.steps=2", "--set",
         "sample.size=[64, 64]", "--set", "sample.every=0", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=0",
         "--set", "validation.every=1", "--lr", 0.05)
QUICK = ("--device", "cpu", "--quiet", "--seeds", 2)
LAYOUT = Path(__file__).parents[2] / "pages" / "layout.js"
RED = "a <b>red</b> circle " + "W" * 120


@pytest.fixture
def run(root, tmp_path):
    """A copy of the run beside its manifest."""
    place = root / tmp_path.name
    shutil.copytree(root / "run", place)
    yield place
    shutil.rmtree(place)


def counted(monkeypatch, end_after=10**9):
    """The pictures that are drawn from now on, by the prompts of each call; Ctrl-C after so many are kept."""
    calls, kept, pictures, put = [], [], drawing.pictures, Kept.put_picture

    def draws(denoiser, rows, model, prompts, *words, **named):
        calls.extend((each.prompt, each.settings.seed) for each in prompts)
        return pictures(denoiser, rows, model, prompts, *words, **named)

    def keeps(self, key, pixels):
        if len(kept) == end_after:
            raise KeyboardInterrupt
        kept.append(key)
        put(self, key, pixels)

    monkeypatch.setattr(drawing, "pictures", draws)
    monkeypatch.setattr(Kept, "put_picture", keeps)
    return calls


def nothing_left(monkeypatch):
    """From now on nothing may be drawn or embedded."""
    monkeypatch.setattr(drawing, "load", lambda *_, **__: pytest.fail("a denoiser is loaded"))
    monkeypatch.setattr(drawing, "VisionEncoder", lambda *_, **__: pytest.fail("a vision model is loaded"))


def test_numbers_pictures_and_a_page(root, run, train, monkeypatch):
    """Of library and NumPy alone; a second call draws nothing and says the same."""
    calls = counted(monkeypatch)
    done = train("evaluate", run, *QUICK, "--html", run / "page.html", "--json")
    assert done.code == 0 and done.err == "", done.err
    document = done.json
    Draft202012Validator(SCHEMA).validate(document)
    assert len(calls) == 3 * (2 * 2 + 2) + 2 and set(calls) == {
        (text, first + number) for text, first in ((RED, 0), ("a blue square", 7), ("", 0))
        for number in (0, 1)}
    nothing_left(monkeypatch)
    assert train("evaluate", run, *QUICK, "--json").json == document
    said = train("evaluate", run, "--device", "cpu", "--seeds", 2)
    assert all(line.endswith("-") for line in said.out.splitlines()[1:4])  # DINOv2 reads no prompts
    assert {each["prompt_fit"] for each in document["checkpoints"]} == {None}
    assert said.out.splitlines()[-1] == (
        f"proposed: {document['proposal']['checkpoint'] or 'none'}: {document['proposal']['reason']}")
    assert said.err == f"0 pictures drawn; all are in {run / 'evaluation'}\n"

    found = running.evaluate(asked(run), torch.device("cpu"))
    opened = open_manifest(read_manifest(root / "m.json"))
    rows, roles = embeddings_of(opened)[0].astype(np.float64), np.asarray(opened.samples.role)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    base = library_rows(root / "vision", [found.kept.picture(key) for key in found.base.keys])
    losses = {event["step"]: event["loss"] for event in map(json.loads, (run / "log.jsonl").read_text().splitlines())
              if event["event"] == "validation"}
    for column, told in zip(found.columns, document["checkpoints"], strict=True):
        made = library_rows(root / "vision", [found.kept.picture(key) for key in column.keys])
        for name, role in (("training", 0), ("held_out", 1)):
            near = np.sort(made[:4] @ rows[roles == role].T, axis=1)[:, ::-1][:, :8]
            assert told[name] == pytest.approx(near.mean(), abs=2e-3)
        assert told["nearest"] == pytest.approx((made[:4] @ rows[roles == 0].T).max(), abs=2e-3)
        assert told["drift"] == pytest.approx(
            (1 - (made[4:] * base).sum(axis=1)).mean() / (1 - base[0] @ base[1]), rel=0.05, abs=0.01)
        assert told["validation"] == losses[told["step"]]
    assert len({told["training"] for told in document["checkpoints"]}) == 3
    assert train("sample", run, "--checkpoint", "step-000002", "-o", run / "g.png", "--device", "cpu").code == 0
    cell = np.asarray(Image.open(run / "g.png"))[14:206:3, :192:3]  # 64 pixels, shown three times as large
    assert np.array_equal(cell, found.kept.picture(found.columns[1].keys[0]))
    html = (run / "page.html").read_text()
    assert html.count("<img ") == 4 * 3 + 2 * 4 and "<b>" not in html and "W, seed 1, at step 3" in html


def test_how_pictures_fit_their_prompts_is_shown(root, run, prep, train, tiny_model):
    """By a vision model that reads texts; the rule does not depend on it."""
    clip = build(root / "clip", "clip", reads=True)
    done = prep("encode", root / "photos", "--embed", clip, "--model", tiny_model, "--cache", root / "cache", "-o",
                root / "fit.json", "--prompts", root / "prompts.txt", "--resolution", 64, "--step", 32,
                "--validation", 0.3)
    assert done.code == 0, done.err
    words = ("evaluate", run, "--manifest", root / "fit.json", "--seeds", 2, "--every", 3, "--device", "cpu")
    done = train(*words, "--json", "--html", run / "page.html").json
    Draft202012Validator(SCHEMA).validate(done)
    ((name, said),) = [(each["name"], each["prompt_fit"]) for each in done["checkpoints"]]
    found = running.evaluate(replace(asked(run), every=3, sample=replace(
        asked(run).sample, manifest=root / "fit.json")), torch.device("cpu"))
    pictures = [found.kept.picture(key) for key in found.columns[0].keys[:4]]
    texts = library_texts(clip, "clip", [each.prompt for each in found.columns[0].prompts[:4]])
    assert said == pytest.approx((library_rows(clip, pictures) * texts).sum(axis=1).mean(), abs=2e-3)
    head, row, *_ = train(*words, "--quiet").out.splitlines()
    assert head.endswith("  prompt fit") and row.startswith(name) and row.endswith(f"{said:.4f}")
    assert f">{said:.4f}<" in (run / "page.html").read_text()
    (clip / "tokenizer.json").write_text("{")  # rows of the former tokenizer are not taken
    broken = train(*words, "--json")
    assert broken.code == 0 and {each["prompt_fit"] for each in broken.json["checkpoints"]} == {None}
    assert "warning: texts are not compared with pictures: cannot load the tokenizer in " in broken.err


def asked(run):
    return EvaluateRequest(sample=SampleRequest(run=Local(run), which=("after",)), seeds=2)


def trained(root):
    """The name of a training picture."""
    samples = open_manifest(read_manifest(root / "m.json")).samples
    return samples.name(int(np.flatnonzero(np.asarray(samples.role) == 0)[0]))


def test_an_interrupted_evaluation_goes_on_and_damage_is_repaired(root, run, train, monkeypatch):
    whole = train("evaluate", run, *QUICK, "--json").json
    files = {path.name: path.read_bytes() for path in (run / "evaluation").iterdir()}
    shutil.rmtree(run / "evaluation")
    monkeypatch.setattr(drawing, "AT_ONCE", 2)
    with monkeypatch.context() as patched:
        calls = counted(patched, end_after=10)
        done = train("evaluate", run, *QUICK, "--json")
        assert done.code == 130 and len(calls) == 12
        assert "the pictures so far are kept. Run the same command again to continue" in done.err
    with monkeypatch.context() as patched:
        calls = counted(patched)
        assert train("evaluate", run, *QUICK, "--json").json == whole and len(calls) == 20 - 10
    assert {path.name: path.read_bytes() for path in (run / "evaluation").iterdir()} == files
    pictures = sorted((run / "evaluation").glob("*.png"))
    pictures[0].write_bytes(pictures[0].read_bytes()[:-20])
    next((run / "evaluation").glob(f"{pictures[3].stem}-*.row")).write_bytes(b"short")
    with monkeypatch.context() as patched:
        calls = counted(patched)
        assert train("evaluate", run, *QUICK, "--json").json == whole and len(calls) == 1
    found = running.evaluate(asked(run), torch.device("cpu"))
    shutil.copy(root / "photos" / trained(root), run / "evaluation" / f"{found.columns[1].keys[2]}.png")
    said = train("evaluate", run, *QUICK).out
    assert re.search(rf"^step-000002: '{RED}', seed 1, is nearly .*{trained(root)} \(cosine 1\.0000\)$",
                     said, re.MULTILINE), said


def test_the_page_is_one_file_on_which_nothing_breaks(browser, run, train):
    shutil.rmtree(run / "checkpoints" / "step-000002")
    page = run / "page.html"
    assert train("evaluate", run, *QUICK, "--html", page).code == 0
    for width, scheme in ((1200, "light"), (390, "dark")):
        browser.open(page, width=width, scheme=scheme)
        assert browser.run(LAYOUT.read_text()) == []
    assert browser.requests()[-1] == page.as_uri() and browser.complaints() == []


def test_other_prompts_every_second_checkpoint_and_what_should_stay(root, run, train, monkeypatch):
    (root / "own.txt").write_text(f"{RED} --s 1\nunheard of\n")
    (root / "stay.txt").write_text("a blue square --n blurry\n")
    done = train("evaluate", run, *QUICK, "--prompts", root / "own.txt", "--neutral", root / "stay.txt", "--every", 2,
                 "--seed", 5, "--json")
    document = done.json
    assert [each["name"] for each in document["checkpoints"]] == ["step-000001", "step-000003"]
    assert (document["prompts"], document["pictures"], document["neutral"]) == ([RED], 2, 2)
    assert "warning: the prompt in line 2 of " in done.err and document["warnings"]
    monkeypatch.setattr(running, "no_prompt", lambda _: ())  # as of a model that only paints into pictures
    document = train("evaluate", run, *QUICK, "--every", 3, "--json").json
    assert (document["neutral"], document["checkpoints"][0]["drift"]) == (0, None)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("--method", "full"), ("--set", "ema.decay=0.5", "--set", "lora.init=pissa")])
def test_full_runs_and_averages(root, train, tmp_path, settings):
    place = root / tmp_path.name
    assert train("run", root / "m.json", "-o", place, "--steps", 2, *SMALL, *settings).code == 0
    document = train("evaluate", place, *QUICK, "--json").json
    first, second = document["checkpoints"]
    assert first["training"] != second["training"] and first["drift"] > 0
    assert train("sample", place, "-o", place / "g.png", "--device", "cpu").code == 0
    cell = np.asarray(Image.open(place / "g.png"))[14:206:3, :192:3]
    assert any(np.array_equal(cell, np.asarray(Image.open(path))) for path in (place / "evaluation").glob("*.png"))


def test_errors_say_the_way_out(root, run, prep, train, tiny_model, monkeypatch):
    other = build(root / "other-vision", "dinov2", seed=1)

    def refused(*words, code, said, hint):
        done = train("evaluate", *words, *QUICK)
        assert done.code == code and said in done.err and hint in done.err.splitlines()[-1], done.err

    refused(run, "--embed", other, code=6, said=" did not make the embeddings of ", hint="with --embed")
    refused("s3://bucket/run", code=5, said="run s3://bucket/run is in an object store", hint="copy it")
    refused(run, "--html", run / "page.txt", code=5, said="page.txt is not named like an HTML page",
            hint=f"--html {run / 'page.html'}")
    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "options", ())
        refused(run, code=6, said="m.json does not say where the vision model is that made its embeddings",
                hint="name it: --embed MODEL")
    with monkeypatch.context() as patched:
        patched.setattr(VisionEncoder, "begin", lambda *_: lambda: [None])
        patched.setattr(VisionEncoder, "_forward", lambda *_: [None])
        refused(run, code=6, said=" returns values that are not finite for a drawn picture",
                hint="another with --embed")
    with monkeypatch.context() as patched:
        patched.setattr(running, "embeddings_of", lambda opened: (
            embeddings_of(opened)[0], np.zeros(len(opened.samples), bool)))
        refused(run, code=7, said="m.json has no embedding of a training picture", hint="run prep encode again")
    assert prep("encode", root / "photos", "--model", tiny_model, "--cache", root / "cache", "-o", root / "plain.json",
                "--prompts", root / "prompts.txt", "--resolution", 64, "--step", 32, "--validation", 0.3).code == 0
    refused(run, "--manifest", root / "plain.json", code=3, said="plain.json has no embeddings of its pictures to "
            "compare with", hint="prep encode SOURCE --embed MODEL, or set model in [embed] of the recipe")
    (run / "none.txt").write_text("\n")
    refused(run, "--prompts", run / "none.txt", code=5, said=" has no prompts", hint="hint: write one on each line")
    (run / "none.txt").write_text("unheard of\n")
    refused(run, "--neutral", run / "none.txt", code=7, said="the cache has no text row of any prompt in ",
            hint="hint: store the rows of a prompt file: prep prompts ")
    shutil.rmtree(run / "evaluation")
    damaged = run / "checkpoints" / "step-000002"
    weights = damaged / "lora.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    refused(run, code=7, said="step-000002", hint=f"the others are evaluated once {damaged} is moved out of the run")
    (damaged / "state.json").write_text("{}")
    refused(run, code=7, said="step-000002", hint=f"the others are evaluated once {damaged} is moved out of the run")
    shutil.rmtree(run / "checkpoints")
    refused(run, code=5, said=f"{run} has no checkpoint to evaluate", hint="checkpoint.keep")
