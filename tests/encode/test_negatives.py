"""Negative prompts of families that encode them otherwise than captions: rows and keys of their own, everywhere."""

from __future__ import annotations

import json

import pytest
import torch
from pictures import draw

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest
from prep.recipe.prompts import prompts_of
from train.sampling import text
from train.sampling.prompts import look_up

CPU = torch.device("cpu")
PROMPTS = b"a cat --n a dog\na dog --n a cat\n"  # each text is a prompt, and the negative of the other


@pytest.fixture
def encoded(prep, tmp_path):
    """A cache of Lumina 2, and a function that runs the command that made it."""
    tiny_pipelines.save("lumina2", tmp_path / "model")
    draw(tmp_path / "photos" / "one.png", (64, 64), seed=1).with_suffix(".txt").write_text("a cat")
    (tmp_path / "prompts.txt").write_bytes(PROMPTS)

    def again():
        done = prep("encode", tmp_path / "photos", "--model", tmp_path / "model", "--cache", tmp_path / "cache", "-o",
                    tmp_path / "m.json", "--prompts", tmp_path / "prompts.txt", "--resolution", 64, "--step", 32,
                    "--dtype", "float32", "--device", "cpu", "--json")
        assert done.code == 0, done.err
        return done.json

    again()
    return again


def test_a_negative_prompt_has_another_row_than_the_same_caption(encoded, tmp_path):
    index = open_index(read_manifest(tmp_path / "m.json"))
    one, other = index.manifest.document["prompts"]["samples"]
    rows = Rows(index)
    found = {name: rows.text([index.ref(**place)])["attention_mask"].sum().item() for name, place in (
        ("cat", one["positive"]), ("not dog", one["negative_row"]), ("dog", other["positive"]),
        ("not cat", other["negative_row"]))}
    assert found["cat"] == found["dog"] > 100 > found["not cat"] == found["not dog"]
    captions = index.samples.texts
    assert index.ref(int(captions["shard"][0]), int(captions["row"][0])) == index.ref(**one["positive"])


def test_a_second_run_and_verify_agree(encoded, prep, tmp_path):
    before = (tmp_path / "m.json").read_bytes()
    encoded()
    assert (tmp_path / "m.json").read_bytes() == before
    done = prep("verify", tmp_path / "m.json")
    assert done.code == 0, done.out + done.err


def test_verify_finds_a_caption_s_row_in_place_of_a_negative_prompt_s(encoded, prep, tmp_path):
    document = json.loads((tmp_path / "m.json").read_text())
    one, other = document["prompts"]["samples"]
    one["negative_row"] = other["positive"]
    (tmp_path / "m.json").write_text(json.dumps(document))
    assert prep("verify", tmp_path / "m.json").code != 0


def test_prompts_are_looked_up_as_what_they_are(encoded, tmp_path, monkeypatch):
    index = open_index(read_manifest(tmp_path / "m.json"))
    samples = index.manifest.document["prompts"]["samples"]
    asked = prompts_of(PROMPTS, tmp_path / "prompts.txt", "FILE")[0]
    monkeypatch.setattr(text, "TextEncoder", None)  # everything is in the cache
    for found in (look_up(index, asked, tmp_path / "prompts.txt").prompts,
                  text.encode_prompts(index, tmp_path / "model", asked, CPU)):
        assert [(one.positive, one.negative) for one in found] == [
            (index.ref(**one["positive"]), index.ref(**one["negative_row"])) for one in samples]


def test_a_prompt_that_is_not_cached_is_encoded_as_what_it_is(encoded, tmp_path):
    index = open_index(read_manifest(tmp_path / "m.json"))
    asked, _ = prompts_of(b"a bird --n a bird", tmp_path / "p.txt", "FILE")
    (one,) = text.encode_prompts(index, tmp_path / "model", asked, CPU)
    assert one.positive["hidden"].shape[1] > 100 > one.negative["hidden"].shape[1]
