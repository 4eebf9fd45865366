"""`prep prompts` replaces a manifest's prompts, and nothing that decides training steps."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from model_files import change_json
from pictures import draw, draw_mask
from safetensors.torch import load_file, save_file

from prep.digest import canonical, with_checksum
from prep.loader.identity import identify
from prep.loader.index import open_index
from prep.manifest.document import read_manifest
from prep.manifest.opened import findings_of
from prep.models.text.encoder import TextEncoder

PROMPTS = "a red cat --n a dog --w 64 --h 64 --d 3\npicture number 1\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        path = draw(tmp_path / "photos" / f"{number}.png", (64, 64), seed=number)
        path.with_suffix(".txt").write_text(f"picture number {number}")
        draw_mask(path.with_name(f"{number}-masklabel.png"), (64, 64))
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    return tmp_path


@pytest.fixture
def model(place, tiny_model):
    return shutil.copytree(tiny_model, place / "model")


@pytest.fixture
def encode(prep, model):
    def go(*options):
        result = prep("encode", "photos", "--model", model, "--cache", "cache", "-o", "m.json", "--resolution", 64,
                      "--step", 32, "--device", "cpu", "--json", *options)
        assert result.code == 0, result.err
        return result.json

    return go


@pytest.fixture
def prompts(prep):
    def go(file="prompts.txt", *options):
        return prep("prompts", file, "--manifest", "m.json", "--device", "cpu", "--json", *options)

    return go


def document(place):
    return json.loads((place / "m.json").read_text())


def identity(place):
    return identify(open_index(read_manifest(place / "m.json")), masked=True, prediction="epsilon")


def test_the_manifest_is_what_encode_writes_with_these_prompts(encode, prompts, place):
    encode()
    before = document(place)
    steps = identity(place)
    shutil.move(place / "photos", place / "elsewhere")
    result = prompts()
    assert result.code == 0, result.err
    # "picture number 1" is a caption, and the unconditional row is there
    assert {name: result.json[name] for name in ("prompts", "encoded", "reused", "findings")} == {
        "prompts": 2, "encoded": 2, "reused": 2, "findings": []}
    written = (place / "m.json").read_bytes()
    assert identity(place).digest == steps.digest
    after = document(place)
    assert {name for name in before if before[name] != after[name]} == {
        "fields", "options", "prompts", "self", "tables"}
    assert {name for name in after["fields"] if before["fields"][name] != after["fields"][name]} == {"text"}
    assert after["prompts"]["samples"][0]["settings"] == {"width": 64, "height": 64, "seed": 3}
    shutil.move(place / "elsewhere", place / "photos")
    assert encode("--prompts", "prompts.txt")["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    assert (place / "m.json").read_bytes() == written


def test_shard_numbers_that_move_are_rewritten(encode, prompts, prep, place):
    """Text shards are sorted by digest: some new shard comes before the captions' own."""
    encode()
    table = document(place)["tables"]["samples"]
    for number in range(40):
        (place / "prompts.txt").write_text(f"prompt {number}\n")
        assert prompts().code == 0
        if document(place)["tables"]["samples"] != table:
            break
    else:
        pytest.fail("the shard of a prompt was never the first")
    assert prep("verify", "m.json").code == 0
    written = (place / "m.json").read_bytes()
    encode("--prompts", "prompts.txt")
    assert (place / "m.json").read_bytes() == written
    (place / "prompts.txt").write_text("")
    assert prompts().json["prompts"] == 0
    assert document(place)["tables"]["samples"] == table, "as before there were prompts"


def test_only_what_is_new_is_encoded(encode, prompts, place):
    encode("--prompts", "prompts.txt")
    assert prompts().json["encoded"] == 0
    (place / "prompts.txt").write_text(PROMPTS.replace("a red cat", "a blue cat"))
    assert (prompts().json["encoded"], prompts().json["encoded"]) == (1, 0)
    (place / "prompts.txt").write_text(PROMPTS)
    assert prompts().json["encoded"] == 0, "old rows stay until gc"


def test_another_file_is_named_from_now_on(encode, prompts, place):
    encode("--prompts", "prompts.txt")
    (place / "more").mkdir()
    (place / "more" / "other.txt").write_text("another prompt\n")
    assert prompts("more/other.txt").code == 0
    found = document(place)
    assert found["prompts"]["file"] == "more/other.txt"
    assert found["options"][-2:] == ["--prompts", {"path": "more/other.txt"}]
    assert found["options"].count("--prompts") == 1


def test_a_model_with_another_text_encoder_is_refused(encode, prompts, place, model):
    encode()
    written = (place / "m.json").read_bytes()
    path = model / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: value + 0.5 for name, value in tensors.items()}, path, metadata={"format": "pt"})
    result = prompts()
    assert result.code == 6 and "did not make the text rows of" in result.err
    assert "name the model that did with --model, or encode everything again: prep encode photos" in result.err
    assert (place / "m.json").read_bytes() == written
    save_file(tensors, path, metadata={"format": "pt"})
    shutil.move(model, place / "moved")
    assert prompts().code == 6
    assert prompts("prompts.txt", "--model", place / "moved").code == 0


def test_the_vae_does_not_matter(encode, prompts, model):
    encode()
    change_json(model / "vae" / "config.json", sample_size=128)
    assert prompts().code == 0


def test_a_program_whose_text_rows_mean_something_else(encode, prompts, monkeypatch):
    encode()
    monkeypatch.setattr("prep.keys.TEXT_MEANING", 2)
    result = prompts()
    assert result.code == 6 and "were made with meaning 1, and would now be made with 2" in result.err


@pytest.mark.few("change1")
@pytest.mark.parametrize(("change", "message"), [
    ({"stored": "int4"}, "has text rows of dtype 'int4', computed in 'bfloat16', expected bfloat16 or "),
    ({"max_length": "x"}, "does not say how its text rows were encoded: ValueError"),
    ({"max_length": 5}, "model.max_length is 5, expected 77"),
    ({"more": 1}, "were made with more 1, and would now be made with None")])
def test_contexts_that_this_program_does_not_write(encode, prompts, place, change, message):
    encode()
    found = document(place)
    del found["self"]
    found["fields"]["text"]["context"].update(change)
    (place / "m.json").write_bytes(canonical(with_checksum(found)))
    result = prompts()
    assert result.code in (3, 4, 6) and message in result.err


def test_an_interrupted_run_leaves_the_manifest_and_goes_on(encode, prompts, place, monkeypatch):
    encode()
    written = (place / "m.json").read_bytes()

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TextEncoder, "encode", stop)
        assert prompts().code == 130
    assert (place / "m.json").read_bytes() == written
    assert prompts().json["encoded"] == 2
    assert not list((place / "cache" / "plans").glob("*"))


def test_prompts_that_cannot_be_encoded_are_findings_until_they_are_replaced(encode, prompts, place, monkeypatch):
    encode()
    with monkeypatch.context() as patch:
        encoded = TextEncoder.encode
        patch.setattr(TextEncoder, "encode", lambda self, captions, *args, **options: [
            None if "red" in caption else row
            for caption, row in zip(captions, encoded(self, captions, *args, **options), strict=True)])
        result = prompts()
    assert result.code == 0 and result.json["prompts"] == 1
    assert [(one["path"], one["code"]) for one in result.json["findings"]] == [("a red cat", "prompt-not-encoded")]
    assert [one.code for one in findings_of(read_manifest(place / "m.json"))] == ["prompt-not-encoded"]
    assert prompts().json["prompts"] == 2, "tried again"
    assert not findings_of(read_manifest(place / "m.json"))


def test_prompts_that_are_too_long(encode, prompts, prep, place):
    (place / "photos" / "1.txt").write_text("long " * 90)
    encode()
    (place / "prompts.txt").write_text(f"a cat\n{'word ' * 90}\n")
    result = prep("prompts", "prompts.txt", "--manifest", "m.json")
    assert "warning: word word" in result.out
    assert re.search(r"prompt-over-limit: CLIP reads 75 of \d+ tokens, and not 'w", result.out)
    assert "hint: prep encode --text-windows 3 reads up to 225 tokens of a caption\n" in result.out
    assert "m.json: 2 prompts in " in result.out and "rows: 2 encoded, 1 reused" in result.out
    codes = ["caption-over-limit", "prompt-over-limit"]
    assert sorted(one.code for one in findings_of(read_manifest(place / "m.json"))) == codes
    (place / "prompts.txt").write_text("a cat\n")
    prompts()
    assert [one.code for one in findings_of(read_manifest(place / "m.json"))] == codes[:1]


def test_files_that_are_no_prompts(encode, prompts, place):
    encode()
    written = (place / "m.json").read_bytes()
    (place / "bad.txt").write_text("a cat --x 3\n")
    for file, code in (("bad.txt", 3), ("none.txt", 5), ("cache/latentry.json", 5), ("m.json", 5)):
        assert prompts(file).code == code, file
    (place / "large.txt").write_text("\x01" * (1 << 18))
    assert prompts("large.txt").code == 3
    assert (place / "m.json").read_bytes() == written


@pytest.mark.parametrize("name", ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zimage", "sdxl"))])
def test_other_families(prep, prompts, place, name):
    pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
    tiny_pipelines = pytest.importorskip("tiny_pipelines")
    tiny_pipelines.save(name, place / name)
    words = ("encode", "photos", "--model", name, "--cache", "cache", "-o", "m.json", "--resolution", 64, "--step", 32,
             "--device", "cpu", "--dtype", "float32")
    assert prep(*words).code == 0
    result = prompts()
    assert result.code == 0 and result.json["encoded"] == 2, result.err
    written = (place / "m.json").read_bytes()
    assert prep(*words, "--prompts", "prompts.txt").code == 0
    assert (place / "m.json").read_bytes() == written


@pytest.mark.slow
def test_a_run_goes_on_with_new_prompts_and_trains_the_same_steps(encode, prompts, train, place):
    """What decides steps is unchanged: the weights are those of a run that nothing interrupted."""
    encode()
    words = ("--batch-size", 1, "--device", "cpu", "--precision", "fp32", "--set", "sample.every=2", "--set",
             "sample.steps=2")
    assert train("run", "m.json", "-o", "whole", "--steps", 4, *words).code == 0
    assert train("run", "m.json", "-o", "halved", "--steps", 2, *words).code == 0
    assert prompts().json["prompts"] == 2
    result = train("run", "m.json", "-o", "halved", "--resume", "--steps", 4)
    assert result.code == 0, result.err
    whole, halved = (load_file(place / name / "lora.safetensors") for name in ("whole", "halved"))
    assert whole.keys() == halved.keys() and all((whole[name] == halved[name]).all() for name in whole)
    drawn = [(place / name / "samples" / "step-000004.png").read_bytes() for name in ("whole", "halved")]
    assert drawn[0] != drawn[1], "of the new prompts"
