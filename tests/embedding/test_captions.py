"""Captions that do not fit their pictures: named by `prep embed`, and on the page of `prep view`."""

from __future__ import annotations

import shutil
import signal

import numpy as np
import pytest
from pictures import draw
from PIL import Image
from viewing import viewing_here
from vision_models import build, library_texts, teach

from prep.manifest.document import read_manifest, write_manifest
from prep.models.vision import text_encoder, texts

SIZED = ("--resolution", 64, "--step", 8)
COUNT = 40


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """(pictures with captions, a CLIP for which each caption is its picture, the caption that fits picture 3 worst)."""
    root = tmp_path_factory.mktemp("taught")
    paths = [draw(root / "photos" / f"{number:02}.png", (64, 64), seed=number) for number in range(COUNT)]
    captions = [f"<b>{number}</b> of {chr(97 + number % 26) * (1 + number % 7)} things" for number in range(COUNT)]
    for path, caption in zip(paths, captions, strict=True):
        path.with_suffix(".txt").write_text(caption)
    folder, pixels = build(root / "clip", "clip", reads=True), [np.asarray(Image.open(path)) for path in paths]
    teach(folder, pixels, captions)
    rows = library_texts(folder, "clip", captions)  # those of the pictures, too
    return root / "photos", folder, captions[int((rows @ rows[3] - rows @ rows.mean(axis=0)).argmin())]


@pytest.fixture(autouse=True)
def own_memory(monkeypatch, tmp_path):
    """A memory for each test."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "own"))


def misfits(done):
    return [(each["path"], each["detail"]) for each in done["findings"] if each["code"] == "caption-misfit"]


def test_a_wrong_caption_is_named_and_an_interrupted_run_continued(prep, taught, tiny_model, tmp_path, monkeypatch):
    source, model, wrong = taught
    photos = shutil.copytree(source, tmp_path / "photos")
    words = ("embed", photos, "--model", model, "--cache", tmp_path / "cache", *SIZED)
    encode = ("encode", photos, "--embed", model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--model",
              tiny_model, *SIZED)
    assert prep(*words, "--dry-run", "--json").json["captions"] == {"made": COUNT, "reused": 0}
    monkeypatch.setattr(texts, "BATCH", 16)
    with monkeypatch.context() as patched:
        rows, given = text_encoder.TextEncoder.rows, []

        def interrupted(self, some):
            given.extend([some] if some != ["a"] else ())  # which a model is tried with
            if some != ["a"] and len(given) % 2 == 0:
                signal.raise_signal(signal.SIGTERM if len(given) == 2 else signal.SIGINT)
            return rows(self, some)

        patched.setattr(text_encoder.TextEncoder, "rows", interrupted)
        stopped = prep(*encode)
        assert "finished work is kept; run the same command again to continue" in stopped.err
        assert (stopped.code, prep(*words).code, (tmp_path / "m.json").exists()) == (75, 130, False)
    done = prep(*words, "--json").json
    assert (done["captions"], misfits(done)) == ({"made": COUNT - 32, "reused": 32}, [])
    (photos / "03.txt").write_text(wrong)
    said = prep(*words)
    assert said.out.splitlines()[-1].endswith(" s; 39 captions: made 0, reused 39")  # it is another's, too
    ((path, detail),) = misfits(prep(*words, "--json").json)
    assert path == "03.png" and detail.endswith(f"% of random pictures are nearer to its caption '{wrong}'")
    assert f"\ninfo\tcaption-misfit\t03.png\t{detail}\n" in f"\n{said.out}"
    (tmp_path / "r.toml").write_text(f"[embed]\nmodel = '{model}'\n[similarity]\nmisfit = 1.0\n[[source]]\n"
                                     f"path = '{photos}'\n")
    assert misfits(prep("embed", tmp_path / "r.toml", "--cache", tmp_path / "cache", *SIZED, "--json").json) == []
    assert prep(*encode).code == 0
    with viewing_here(tmp_path / "m.json") as server:
        page = server.get("/set").text.replace("<wbr>", "")
        assert "caption-misfit" in page and "captions that do not fit" in page and "<b>" not in page
        assert wrong.replace("<", "&lt;").replace(">", "&gt;") in page
    for context in ({"output": "features"}, {}):  # which anybody may have written
        document = read_manifest(tmp_path / "m.json").document
        document["fields"]["embedding"]["context"] = context
        write_manifest(tmp_path / "m.json", document)
        with viewing_here(tmp_path / "m.json") as server:
            assert "caption-misfit" not in (page := server.get("/set").text) and "semantic-duplicate" in page


def test_captions_of_other_pictures_are_said_once_and_of_several_one_is_named(prep, taught, tmp_path):
    source, model, wrong = taught
    photos = shutil.copytree(source, tmp_path / "photos")
    words = ("embed", photos, "--model", model, "--cache", tmp_path / "cache", *SIZED, "--json")
    own = [(photos / f"{number:02}.txt").read_text() for number in range(COUNT)]
    (photos / "03.txt").write_text(f"{own[3]}\n{wrong}\n")
    (photos / "04.txt").write_text("")
    several = prep(*words).json
    ((path, detail),) = misfits(several)
    assert path == "03.png" and wrong in detail and sum(several["captions"].values()) == COUNT - 1
    for number in range(COUNT):
        (photos / f"{number:02}.txt").write_text(own[number - 1])
    ((path, detail),) = misfits(prep(*words).json)
    assert path == "." and "are nearer to half of the captions than their own pictures" in detail


def test_models_that_read_nothing_compare_nothing(prep, photos, tmp_path, monkeypatch):
    reading = build(tmp_path / "siglip", "siglip", reads=True)
    words = ("--cache", tmp_path / "cache", *SIZED, "--json")
    monkeypatch.setattr(texts, "find_spec", lambda name: None if name == "sentencepiece" else name)
    done = prep("embed", photos, "--model", reading, *words)
    assert done.json["captions"] == {"made": 0, "reused": 0}
    assert (f"note: texts are not compared with pictures: the tokenizer in {reading} needs sentencepiece: pip install "
            "'latentry[siglip]'") in done.err
    silent = prep("embed", photos, "--model", build(tmp_path / "dino", "dinov2"), *words)
    assert silent.json["captions"] is None and silent.err.count("caption") == 0, silent.err
