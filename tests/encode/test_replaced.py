"""A manifest that another one replaces: its prompts stay, what the new one lacks is said, and it is kept until gc."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[2] / "manifests" / "schemas"


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    (tmp_path / "p.txt").write_text("a red cat --n blurry --w 64\na blue square\n")

    def run(*words):
        told = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                    "--resolution", 64, "--step", 16, "--device", "cpu", *words)
        assert told.code == 0, told.err
        return told

    return run


def prompts_of(tmp_path):
    return json.loads((tmp_path / "m.json").read_text())["prompts"]


def kept(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if ".replaced-" in path.name)


def test_prompts_stay_unless_others_are_named(encode, tmp_path):
    encode("--prompts", tmp_path / "p.txt")
    first = (tmp_path / "m.json").read_bytes()
    told = encode()
    assert "note: sample prompts as in the m.json that this replaces (2 prompts, from " in told.err
    assert "--prompts none leaves them out" in told.err
    assert (tmp_path / "m.json").read_bytes() == first and kept(tmp_path) == []
    (tmp_path / "p.txt").write_text("another\n")
    encode()
    assert [one["prompt"] for one in prompts_of(tmp_path)["samples"]] == ["another"]
    (tmp_path / "p.txt").unlink()
    told = encode("--validation", 0.3)
    assert "(1 prompt, whose file is gone)" in told.err
    assert [one["prompt"] for one in prompts_of(tmp_path)["samples"]] == ["another"]
    told = encode("--prompts", "none")
    assert prompts_of(tmp_path)["samples"] == [] and "1 sample prompt, now 0" in told.err
    assert "sample prompts as in" not in encode().err


def test_settings_of_prompts_stay_without_their_file(encode, tmp_path):
    encode("--prompts", tmp_path / "p.txt")
    before = prompts_of(tmp_path)["samples"]
    (tmp_path / "p.txt").unlink()
    encode()
    assert prompts_of(tmp_path)["samples"] == before and before[0]["settings"] == {"width": 64}


def test_what_the_new_one_lacks_is_said_and_the_old_one_kept_until_gc(encode, prep, tmp_path):
    encode("--mask", "sidecar", "--validation", 0.3)
    first = (tmp_path / "m.json").read_bytes()
    told = encode("--mask", "none", "--json")
    Draft202012Validator(json.loads((SCHEMAS / "encode.schema.json").read_text())).validate(told.json)
    (name,) = kept(tmp_path)
    assert told.json["replaced"]["kept"] == str(tmp_path / name) and (tmp_path / name).read_bytes() == first
    lacks = told.json["replaced"]["lacks"]
    assert "masks" in lacks and "--validation 0.3" in lacks and any("validation samples, now 0" in one for one in lacks)
    assert f"note: {tmp_path}/m.json lacks what the one before had: " in told.err
    assert f"{name} until prep gc" in told.err
    assert prep("inspect", tmp_path / name).code == 0
    assert "replaced" not in encode("--mask", "none", "--json").json
    shown = prep("gc", tmp_path / "cache", "--keep", tmp_path / "m.json", "--older-than", "0", "--json")
    Draft202012Validator(json.loads((SCHEMAS / "gc.schema.json").read_text())).validate(shown.json)
    assert shown.json["replaced"] == [str(tmp_path / name)] and shown.json["others"] == [] and kept(tmp_path) == [name]
    held = prep("gc", tmp_path / "cache", "--keep", tmp_path / "m.json", "--keep", tmp_path / name, "--yes")
    assert held.code == 0 and kept(tmp_path) == [name]
    done = prep("gc", tmp_path / "cache", "--keep", tmp_path / "m.json", "--older-than", "0", "--yes")
    assert "removed 1 replaced manifest" in done.out and kept(tmp_path) == []


def test_a_dry_run_keeps_nothing_and_says_which_prompts_it_means(encode, tmp_path):
    encode("--prompts", tmp_path / "p.txt")
    assert "sample prompts as in the m.json" in encode("--dry-run", "--mask", "none").err and kept(tmp_path) == []
