"""Facts that native code must parse are read by a worker: what it costs is a finding, and what it says is checked."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from pictures import saved
from PIL import Image, ImageCms

from prep.dataset import reading
from prep.dataset.facts import READERS
from prep.dataset.reading import FactReader, NotRead, checked, needs_worker
from prep.digest import digest_bytes
from prep.parse import Unparsed
from prep.workers.pool import WorkerPool
from prep.workers.service import Limits

BAD = (str(Path(__file__).parents[1] / "support" / "bad_reader.py"),)
PICTURE = Image.linear_gradient("L").convert("RGB").resize((40, 24))
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits are POSIX's")


@pytest.fixture
def reader():
    found = FactReader()
    yield found
    found.close()


@pytest.fixture
def bad(monkeypatch):
    """A reader whose workers obey the bytes."""
    monkeypatch.setattr(reading, "WorkerPool", partial(WorkerPool, command=BAD))
    monkeypatch.setattr(reading, "LIMITS", Limits(seconds=1, memory=1 << 30))
    found = FactReader()
    yield found
    found.close()


@pytest.mark.parametrize(("kind", "form", "options", "wanted"), [
    ("picture", "PNG", {}, False), ("picture", "JPEG", {}, False), ("picture", "GIF", {}, False),
    ("picture", "BMP", {}, False), ("picture", "WEBP", {}, True), ("picture", "TIFF", {}, True),
    ("picture", "JPEG", {"icc_profile": PROFILE}, True), ("picture", "PNG", {"icc_profile": PROFILE}, True),
    ("mask-size", "PNG", {}, False), ("mask-size", "WEBP", {}, True), ("mask", "PNG", {}, True),
    ("picture-alpha", "PNG", {}, True), ("file", "WEBP", {}, False),
])
def test_the_answer_is_the_same_wherever_it_is_read(reader, kind, form, options, wanted):
    data = saved(PICTURE, form, **options)
    assert needs_worker(kind, data) is wanted
    assert json.dumps(reader.read(kind, data), sort_keys=True) == json.dumps(READERS[kind](data), sort_keys=True)
    assert reader._pool.started == wanted


def test_what_is_no_picture_starts_no_worker(reader, monkeypatch):
    assert reader.read("picture", b"hello") == READERS["picture"](b"hello")
    assert reader.read("caption", b"a WEBP") == {"captions": ["a WEBP"]}
    monkeypatch.setattr(reading, "MOST_SENT", 100)
    assert reader.read("mask", saved(PICTURE, "PNG"))["focus"]
    assert reader._pool.started == 0


def webp(word):
    return b"RIFF\0\0\0\0WEBP" + word


@posix
@pytest.mark.parametrize(("word", "code", "detail"), [
    (b"crash", "decoder-crashed", "crashed its decoder, which ended by SIGSEGV"),
    (b"hang", "decoder-hung", "was not decoded within 1 seconds"),
    (b"code", "decoder-crashed", "got an invalid answer from its decoder: code is 'no such code', expected that of a "
                                 "finding"),
])
def test_a_bad_file_costs_a_finding(bad, word, code, detail):
    with pytest.raises(NotRead) as caught:
        bad.read("picture", webp(word))
    assert (caught.value.code, caught.value.detail) == (code, detail)
    assert bad.read("picture", saved(PICTURE, "WEBP"))["width"] == 40  # by another worker


@posix
def test_a_file_may_lie_of_itself_but_has_its_own_digest(bad):
    assert bad.read("picture", webp(b"lie")) == {"digest": digest_bytes(webp(b"lie")), "width": 7, "height": 5,
                                                  "alpha": False}


@pytest.mark.parametrize(("said", "why"), [
    ("{", "the fact is not JSON: "), ("[]", "the fact is "), ('{"captions": []}', "the fact has 'captions'"),
    ('{"width": 0}', "width is 0, expected a number from 1 to"), ('{"alpha": 1}', "alpha is 1, expected"),
    ('{"size": [1, 2, 3]}', "size has 3 numbers, expected 2"), ('{"focus": [5, 70000]}', r"focus\[1\] is 70000"),
    ('{"focus": [NaN, 5]}', r"focus\[0\] is nan"),
])
def test_impossible_answers(said, why):
    with pytest.raises(Unparsed, match=f"^{why}"):
        checked(said, b"")


def test_answers_keep_what_they_say():
    said = {"size": None, "focus": [250, 1], "detail": "x", "code": "too-large"}
    assert checked(json.dumps(said), b"") == said
    assert checked('{"size": [3, 4]}', b"") == {"size": [3, 4]}


def test_prep_bucket_names_the_file(prep, tmp_path, monkeypatch):
    """Of several: the others are used."""
    monkeypatch.setattr(reading, "WorkerPool", partial(WorkerPool, command=BAD))
    for name, data in (("good.webp", saved(PICTURE.resize((120, 90)), "WEBP")), ("bad.webp", webp(b"crash"))):
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).with_suffix(".txt").write_text("a picture")
    found = prep("bucket", tmp_path, "--resolution", 64, "--json")
    assert "crashed its decoder, which ended by SIGSEGV" in found.out + found.err
    assert found.code == 0 and sum(one["samples"] for one in found.json["buckets"]) == 1, found.out
