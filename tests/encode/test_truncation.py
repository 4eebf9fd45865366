"""`prep encode` names captions that are longer than the text encoders read, with the words that are lost."""

from __future__ import annotations

import pytest
from pictures import draw

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.manifest.document import read_manifest
from prep.manifest.opened import findings_of
from prep.models.text.truncation import TruncationFinder

# A token per byte: the 75th is the second of three that are the first character beyond ASCII.
LONG = "a red dog sits on the bench in the park and looks at the ducks by the lake, near a long bridge 日本 in the RAIN"
TOLD = "CLIP reads 75 of 88 tokens, and not '日本 in the RAIN'"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(name):
        if name not in made:
            made[name] = tiny_pipelines.save(name, tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return model


@pytest.fixture
def encode(prep, models, tmp_path, monkeypatch):
    """`encode("sd15", *options)` encodes `photos`: its result. Remembered is what a test remembers."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "user"))

    def go(name, *options):
        return prep("encode", tmp_path / "photos", "--model", models(name), "--cache", tmp_path / "cache", "-o",
                    tmp_path / "m.json", "--resolution", 64, "--step", 32, "--dtype", "float32", "--device", "cpu",
                    *options)

    return go


@pytest.fixture
def photo(tmp_path):
    def make(name, caption):
        draw(tmp_path / "photos" / f"{name}.png", (64, 64), seed=len(name)).with_suffix(".txt").write_text(
            caption, encoding="utf-8")

    return make


def test_the_words_that_are_lost(encode, photo, tmp_path):
    photo("short", "a cat")
    photo("long", LONG)
    result = encode("sd15")
    assert f"warning: long.png: caption-over-limit: {TOLD}" in result.out
    assert "hint: --text-windows 2 reads up to 150 tokens of a caption" in result.out
    assert "short" not in result.out
    (found,) = encode("sd15", "--json").json["truncated"]
    assert found == {"path": "long.png", "code": "caption-over-limit", "severity": "warning",
                     "detail": TOLD}
    assert [one.as_json() for one in findings_of(read_manifest(tmp_path / "m.json"))] == [found]
    result = encode("sd15", "--text-windows", 2, "--json")
    assert result.code == 0 and result.json["truncated"] == []


def test_a_dry_run_says_the_same_and_remembers_nothing(encode, photo, tmp_path):
    photo("long", LONG)
    dry = encode("sd15", "--dry-run", "--json").json["truncated"]
    assert dry and not (tmp_path / "cache").exists() and not (tmp_path / "user").exists()
    assert encode("sd15", "--json").json["truncated"] == dry


def test_captions_are_counted_once(encode, photo, monkeypatch):
    photo("long", LONG)
    first = encode("sd15", "--json").json["truncated"]
    counted = []
    find = TruncationFinder.find
    monkeypatch.setattr(TruncationFinder, "find", lambda self, captions: counted.extend(captions) or
                        find(self, captions))
    assert encode("sd15", "--json").json["truncated"] == first and not counted
    photo("other", "another " * 40)
    result = encode("sd15", "--json")
    assert len(result.json["truncated"]) == 2 and counted == [("another " * 40).strip()]
    encode("sd15", "--rehash", "--json")
    assert sorted(counted[1:]) == sorted([LONG, ("another " * 40).strip()])


@pytest.mark.slow
def test_what_one_of_two_encoders_reads_whole_is_an_info(encode, photo):
    photo("long", LONG)
    photo("longest", "word " * 600)
    result = encode("flux")
    assert "warning: longest.png: caption-over-limit: T5 reads 511 of" in result.out
    assert "info: 1 caption longer than one text encoder reads; another reads all of it" in result.out
    found = {one["path"]: one for one in encode("flux", "--json").json["truncated"]}
    assert found["long.png"]["severity"] == "info" and found["long.png"]["code"] == "caption-over-one-limit"
    assert found["long.png"]["detail"] == "CLIP reads 75 of 88 tokens, T5 all of them"
    assert "hint: shorten these captions; models of this family read no more" in result.out
    assert "hint: --max-length 512 reads more of a caption" in encode("flux", "--max-length", 100).out


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), ("--max-length", 100)])
def test_a_scan_says_what_encode_says(prep, encode, photo, models, tmp_path, options):
    photo("long", LONG)
    photo("longest", "word " * 600)
    photo("short", "word")
    told = encode("flux", "--json", *options).json["truncated"]
    recipe = tmp_path / "dataset.toml"
    recipe.write_text(f"[model]\nmax_length = {options[1] if options else 0}\n[[source]]\npath = 'photos'\n")
    found = prep("scan", recipe, "--json", "--model", models("flux")).json["findings"]
    assert [one for one in found if one["code"].startswith("caption-over")] == told and len(told) == 2


def test_lines_are_few_and_short(encode, photo):
    for number in range(23):
        photo(f"p{number:02}", f"{number:02} {'word ' * 40}")
    every = encode("sd15", "--all").out
    assert every.count("caption-over-limit") == 23
    out = encode("sd15").out
    assert out.count("caption-over-limit") == 20
    assert "and 3 more captions that are cut; --all lists all by name" in out
    said = next(line for line in out.splitlines() if "p00.png" in line).partition("caption-over-limit: ")[2]
    assert len(said) == 120 and said.endswith("…")


def test_very_long_losses_are_shortened_in_the_finding(encode, photo):
    photo("long", "word " * 500)
    (found,) = encode("sd15", "--json").json["truncated"]
    assert len(found["detail"]) < 600 and found["detail"].endswith("…'")


def test_each_caption_of_a_picture_is_told_once(encode, photo):
    photo("two", f"{LONG}\n{LONG} again and again")
    found = encode("sd15", "--json", "--resolution", "32,64").json["truncated"]
    assert [one["path"] for one in found] == ["two.png", "two.png"] and found[0] != found[1]


def test_prompts_are_told_apart(encode, photo, tmp_path):
    photo("short", "a cat")
    (tmp_path / "prompts.txt").write_text(f"{LONG} --n {LONG}, bad\nshort\n", encoding="utf-8")
    found = encode("sd15", "--prompts", tmp_path / "prompts.txt", "--json").json["truncated"]
    assert [(one["path"], one["code"]) for one in found] == [(LONG, "prompt-over-limit")] * 2
    assert [one["detail"][-7:] for one in found] == ["e RAIN'", "N, bad'"]
