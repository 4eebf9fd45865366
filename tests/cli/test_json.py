"""Every document of --json fits its schema in manifests/schemas, with every key described and none besides."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from pictures import draw
from typer.main import get_command
from vision_models import build

from prep.errors import Problem

FOLDER = Path(__file__).parents[2] / "manifests" / "schemas"
SCHEMAS = {path.name.removesuffix(".schema.json"): json.loads(path.read_text(encoding="utf-8"))
           for path in sorted(FOLDER.glob("*.schema.json"))}
COMMANDS = {f"{program} {name}" for program in ("prep", "train")
            for name, command in get_command(importlib.import_module(f"{program}.cli.main").app).commands.items()
            if any(one.name == "as_json" for one in command.params)}
SMALL = ("--resolution", 96, "--step", 16)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_says_of_which_format(name):
    Draft202012Validator.check_schema(SCHEMAS[name])
    properties = SCHEMAS[name]["properties"]
    assert properties["format"] == {"const": f"latentry/{name}"} and properties["version"]["const"] >= 1
    assert SCHEMAS[name]["additionalProperties"] is False and {"format", "version"} <= set(SCHEMAS[name]["required"])


def fitting(result, code=0):
    """The document of a command that ended with `code`, once it fits its schema."""
    assert result.code == code, result.err
    document = result.json
    Draft202012Validator(SCHEMAS[document["format"].removeprefix("latentry/")]).validate(document)
    return document


@pytest.fixture
def checked(prep, train):
    """`checked("scan", …)` runs a command with --json; `checked.formats` and `checked.commands` are what was seen."""
    class Checked:
        def __init__(self):
            self.formats, self.commands = set(), set()

        def __call__(self, *words, program="prep", code=0):
            self.commands.add(f"{program} {words[0]}")
            document = fitting({"prep": prep, "train": train}[program](*words, "--json"), code)
            self.formats.add(document["format"].removeprefix("latentry/"))
            return document

    return Checked()


def test_the_documents_of_every_command(checked, photos, tiny_model, tmp_path):
    photos_of(photos)
    cache, a, b = tmp_path / "cache", tmp_path / "a.json", tmp_path / "b.json"
    checked("init", photos, "-o", tmp_path / "dataset.toml")
    (tmp_path / "kohya.toml").write_text(
        f'[general]\nflip_aug = true\nkeep_tokens_separator = "|||"\n[[datasets]]\nresolution = 512\n'
        f'[[datasets.subsets]]\nimage_dir = "{photos}"\n')
    checked("init", "--from", tmp_path / "kohya.toml", "-o", tmp_path / "converted.toml")
    assert any("likeness" in one for one in checked("scan", photos, code=1)["findings"])
    assert checked("bucket", photos, *SMALL, "--min-bucket", 2, "--suggest", "--crop", "random", "--views", 2,
                   "--upscale", "allow", "--max-upscale", 1)["suggestions"]
    checked("mask", photos, "--with", "threshold", "-o", tmp_path / "masks")
    seeing = build(tmp_path / "seeing", "siglip")
    checked("embed", photos, "--model", seeing, "--cache", cache, *SMALL, "--device", "cpu")
    encode = ("encode", photos, "--embed", seeing, "--model", tiny_model, "--cache", cache, *SMALL, "--device", "cpu")
    checked(*encode, "-o", a, "--dry-run", code=0)
    assert checked(*encode, "-o", a, "--mask", "sidecar", "--validation", 0.25)["rejected"]
    assert checked("seal", photos, "--model", tiny_model, "--cache", cache, *SMALL, "-o", a, "--mask", "sidecar",
                   "--validation", 0.25)["part"] is None
    (photos / "0.txt").write_text("changed")
    draw(photos / "new.png", (96, 96), seed=50).with_suffix(".txt").write_text("new")
    assert checked(*encode, "-o", b, "--alpha", "black", "--part", "0/1")["part"] == "0/1"
    checked(*encode, "-o", b, "--alpha", "black")
    (photos.parent / "prompts.txt").write_text(f"a cat --n a dog --w 64\n{'long ' * 99}\n")
    assert checked("prompts", photos.parent / "prompts.txt", "--manifest", a, "--device", "cpu")["findings"]
    checked("inspect", a)
    checked("inspect", a, "--sample", "0.png")
    checked("diff", a, b)
    checked("diff", a, a)
    assert checked("export", a, "--to", "kohya", "-o", tmp_path / "kohya")["files"]
    assert checked("import", tmp_path / "kohya", "--from", "kohya-npz", "--model", tiny_model, "--cache", cache, "-o",
                   tmp_path / "imported.json", "--device", "cpu")["imported"]
    checked("compact", cache, "--dry-run")
    checked("compact", cache)
    checked("gc", cache, "--keep", b, "--older-than", "0")
    checked("pack", b, "-o", tmp_path / "b.tar")
    checked("unpack", tmp_path / "b.tar", tmp_path / "unpacked")
    checked("check", a, "--batch-size", 2, program="train")
    assert checked("check", a, "--world-size", 2, "--samples", 1e6, program="train")["outlook"]["samples"] >= 10**6
    checked("check", a, "--batch-size", 64, "--underfill", "drop", program="train", code=8)
    checked("run", a, "--batch-size", 2, "--steps", 1, "--device", "cpu", "--precision", "fp32", "-o", tmp_path / "run",
            program="train")
    checked("merge", tmp_path / "run", "-o", tmp_path / "merged", program="train")
    checked("merge", tmp_path / "run", tmp_path / "run", "-o", tmp_path / "mean.safetensors", program="train")
    checked("resize", tmp_path / "run", "-o", tmp_path / "less.safetensors", "--rank", 2, program="train")
    checked("extract", tiny_model, tmp_path / "merged", "-o", tmp_path / "extracted.safetensors", program="train")
    checked("worst", tmp_path / "run", program="train")
    checked("replay", tmp_path / "run", "--step", 1, program="train")
    checked("report", tmp_path / "run", program="train")
    checked("verify", a)
    for path in (cache / "shards").glob("*/*/latent/c*"):
        path.unlink()
    assert checked("verify", a, code=7)["damaged"]
    checked("codes")
    checked("export", a, "--to", "folder", "-o", tmp_path / "exported")
    checked("models")
    checked("clean", "--dry-run")
    checked("scan", tmp_path / "nowhere", code=5)
    # What needs a store, depends on the computer, or runs until Ctrl-C: tests/remote/test_transfer.py, tests/doctor,
    # tests/captioning, tests/jobs, tests/studio and tests/view check it; what asks a process that trains:
    # tests/train/cli/test_cli.py; tests/train/selection checks what draws with every checkpoint.
    there = {"push", "pull", "doctor", "view", "caption", "jobs", "studio"}
    assert checked.commands == COMMANDS - {f"prep {name}" for name in there} - {
        "train stop", "train sample-now", "train evaluate"}
    assert checked.formats == set(SCHEMAS) - there - {"request", "evaluate"}


def photos_of(photos):
    """Findings of many kinds beside eight good pictures."""
    (photos / "bad.png").write_bytes(b"no picture")
    (photos / "bad.txt").write_text("bad")
    (photos / "copy.png").write_bytes((photos / "1.png").read_bytes())
    (photos / "copy.txt").write_text("copy")


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "words", "code", "kind"), [
    ("prep", ("scan", "nowhere"), 5, "path"), ("prep", ("encode", "nowhere", "--cache", "c"), 5, "path"),
    ("prep", ("inspect", "none.json"), 4, "manifest"), ("prep", ("gc", "c"), 2, "usage"),
    ("prep", ("codes", "x"), 2, "usage"), ("prep", ("scan",), 2, "usage"),
    ("prep", ("scan", ".", "--nmber"), 2, "usage"),
    ("prep", ("scna",), 2, "usage"), ("train", ("run", "none.json"), 4, "manifest"),
    ("train", ("run", "none.json", "--steps", "many"), 2, "usage"),
])
def test_an_error_is_json_with_the_exit_code(request, tmp_path, monkeypatch, program, words, code, kind):
    monkeypatch.chdir(tmp_path)
    plain = request.getfixturevalue(program)(*words)
    result = request.getfixturevalue(program)(*words, "--json")
    error = fitting(result, code)["error"]
    assert (error["exit_code"], error["kind"]) == (code, kind) and plain.code == code and plain.out == ""
    assert error["message"].splitlines()[0] in result.err and error["hint"] in result.err + error["hint"]


def test_every_kind_of_error_is_in_the_schema():
    kinds = {kind.kind for kind in Problem.__subclasses__()} | {"interrupted", "bug"}
    assert set(SCHEMAS["error"]["$defs"]["problem"]["properties"]["kind"]["enum"]) == kinds


@pytest.mark.parametrize(("error", "code", "kind"), [(KeyboardInterrupt(), 130, "interrupted"),
                                                     (ZeroDivisionError("no"), 70, "bug")])
def test_an_interruption_and_a_bug_are_json_too(prep, monkeypatch, photos, error, code, kind):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("prep.scan.run.run_scan", fail)
    assert fitting(prep("scan", photos, "--json"), code)["error"]["kind"] == kind


def test_there_is_one_document_when_a_command_fails_at_its_end(prep, photos):
    """The preview is printed; that it has no step is an error on stderr and an exit code."""
    result = prep("bucket", photos, *SMALL, "--batch-size", 64, "--underfill", "drop", "--json")
    assert fitting(result, 8)["format"] == "latentry/bucket" and result.err.startswith("error: ")
