"""References of samples on every page: found beside their source, named, in order, and never another file."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from pictures import saved
from PIL import Image
from report_pages import MADE
from small_manifest import write_small
from tarred import member, tar_of
from viewing import viewing_here

from prep.dataset.samples import reference_name
from prep.export.pictures import PictureFiles
from prep.fs.blob import Blob, read_blob
from prep.fs.place import place_of
from prep.manifest.describe import describe_samples
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.pages.originals import Originals
from prep.report.snapshots.manifest import page
from prep.sources.item import Item
from prep.sources.walk import walk_source

FILES = {"../control_1/a.png": saved(Image.new("RGB", (96, 96), "teal")),
         "inside/<b>.png": saved(Image.new("RGB", (60, 40), "olive")),
         "../control_3/a.png": saved(Image.new("RGB", (64, 48), "navy"))}


@pytest.fixture
def referred(tmp_path):
    """The manifest's path; a.png has the references FILES."""
    return write_small(tmp_path / "here", pictures={"a.png": saved(Image.new("RGB", (128, 144), "white"))},
                       references=FILES)


def described(path):
    opened = open_manifest(read_manifest(path))
    return opened, describe_samples(opened, "a.png")["samples"][0]


def item_of(picture, name="a.png", *, references=()):
    return Item(name=name, label=name, source=0, picture=picture, caption_at=None, mask=None, references=references)


@pytest.mark.parametrize(("source", "reference", "name"), [
    ("main", "main/x/a.png", "x/a.png"), ("main", "main/a_0.png", "a_0.png"),
    ("main", "control/a.png", "../control/a.png"), ("main", "link/x/a.png", "../control/x/a.png"),
    ("link", "main/a.png", "../main/a.png"), ("link", "control/a.png", "a.png"),
    ("main/a.tar", "main/a.png", "a.png"), ("main/*.tar", "control/a.png", "../control/a.png")])
def test_a_name_leads_back_to_its_file(tmp_path, source, reference, name):
    for folder in ("main/x", "control/x"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("control")
    (tmp_path / reference).write_bytes(b"this one")
    (tmp_path / "main" / "a.tar").write_bytes(tar_of([member("x/0.png", saved(Image.new("RGB", (8, 8))))]))
    blob = Blob(file=str(tmp_path / reference))
    assert reference_name(item_of(Blob(file="a.png")), blob, tmp_path / source) == name
    found = PictureFiles([tmp_path / source]).find_reference(0, name)
    assert found is not None and read_blob(found) == b"this one"


@pytest.mark.parametrize(("source", "reference", "name"), [
    ("main", "main/a.png", "a.png"), ("main", "control/a.png", "../control/a.png"), (".", "a.png", "a.png"),
    ("main", "a.png", "../a.png")])
def test_paths_as_they_are_typed(tmp_path, monkeypatch, source, reference, name):
    """Relative to the working directory, which may be another one in the same process."""
    for place in ("first/deeper", "second"):
        for folder in ("main", "control"):
            (tmp_path / place / folder).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        (tmp_path / place / reference).write_bytes(place.encode())
        assert reference_name(item_of(Blob(file="main/a.png")), Blob(file=reference), Path(source)) == name
        found = PictureFiles([tmp_path / place / source]).find_reference(0, name)
        assert found is not None and read_blob(found) == place.encode()


@pytest.mark.parametrize(("source", "reference", "name"), [
    ("s3://bucket/set/main", "s3://bucket/set/main/x/a.png", "x/a.png"),
    ("s3://bucket/set/main", "s3://bucket/set/control/a.png", "../control/a.png"),
    ("s3://bucket/main.tar", "s3://bucket/control/a.png", "control/a.png")])
def test_names_in_stores_stay_in_their_bucket(source, reference, name):
    assert reference_name(item_of(Blob(file=f"{source}/a.png")), Blob(file=reference), place_of(source)) == name
    found = PictureFiles([place_of(source)])
    if not source.endswith(".tar"):
        assert found.find_reference(0, name).file.endswith(reference.removeprefix("s3://bucket"))
        assert found.find_reference(0, "../../../../a.png") is None


@pytest.mark.parametrize("source", ["one.tar", "*.tar", "?/one.tar"])
def test_a_member_of_a_tar(tmp_path, source):
    """Found in the tar that its name begins with; one in another tar is named alone, and not found."""
    reference = saved(Image.new("RGB", (60, 40), "navy"))
    for place in (".", "a", "b"):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "one.tar").write_bytes(tar_of([
            member("x/0.png", saved(Image.new("RGB", (8, 8)))), member("x/0.txt", b"teal"),
            member("x/0.ref0.png", reference if place != "b" else b"another")]))
    item = next(entry for entry in walk_source(tmp_path / source, source=0, masks="none"))
    (blob,) = item.references
    name = reference_name(item, blob, tmp_path / source)
    assert name == f"{'a/' if '?' in source else ''}one.tar/x/0.ref0.png"
    found = PictureFiles([tmp_path / source]).find_reference(0, name)
    assert found is not None and read_blob(found) == reference
    assert reference_name(item, Blob(file="other.tar", length=1, member="x/0.ref0.png"), tmp_path) == "0.ref0.png"


@pytest.mark.parametrize("name", ["", "/etc/passwd", "..", "a\0b", "x\\..\\a.png", "C:/a.png", "../" * 3000 + "x",
                                  "../photos", "../pipe"])
def test_a_name_that_leads_nowhere_shows_nothing(referred, name):

    os.mkfifo(referred.parent / "pipe")
    opened, sample = described(referred)
    assert Originals(opened).read(sample, {**sample["views"][0]["references"][0], "name": name}) is None


def test_only_a_file_with_the_digest_is_shown(referred):
    """A hostile manifest may name any file: what it does not know the digest of stays hidden."""
    opened, sample = described(referred)
    first, second, _ = sample["views"][0]["references"]
    assert Originals(opened).read(sample, first) == FILES["../control_1/a.png"]
    assert Originals(opened).read(sample, {**first, "name": second["name"]}) is None
    (referred.parent / "control_1" / "a.png").write_bytes(FILES["inside/<b>.png"])
    assert Originals(opened).read(sample, first) is None
    document = {**opened.manifest.document, "sources": [None]}
    gone = replace(opened, manifest=replace(opened.manifest, document=document))
    assert Originals(gone).read(sample, second) is None


def color_of(data):
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB")).reshape(-1, 3).mean(axis=0).round(-1).tolist()


def test_live_pages_show_them_in_order(referred):
    (referred.parent / "control_3" / "a.png").unlink()
    with viewing_here(referred) as running:
        text = running.get().text
        number = re.search(r'/thumbnail/(\d+)/0"', text)[1]
        assert re.findall(rf'/thumbnail/{number}/(\d)"', text) == ["0", "1", "2"]
        assert re.findall(r"(\d+x\d+ to 48x32)", text) == ["96x96 to 48x32", "60x40 to 48x32", "64x48 to 48x32"]
        names = [unescape(one.replace("<wbr>", "")) for one in re.findall(
            r'<span class="label">Reference \d</span><bdi>(.*?)</bdi>', text)]
        assert names == [*FILES] and "<b>" not in text
        assert [color_of(running.get(f"/{kind}/{number}/{place}").body) for kind in ("thumbnail", "picture")
                for place in (0, 1)] == [[0, 130, 130], [130, 130, 0]] * 2
        assert b"missing" in (gone := running.get(f"/picture/{number}/2")).body or gone.headers[
            "content-type"] == "image/svg+xml"
        assert running.get(f"/picture/{number}/3").status == running.get(f"/decode/{number}/0/0").status == 404
        shown = running.get(f"/sample/{number}").text
        assert shown.count("was not found, has changed") == 1 and shown.count('class="crop"') == 3 + 1
        assert [f"/picture/{number}/{place}" in shown for place in (0, 1, 2)] == [True, True, False]
        assert "scaled to 48x48, cropped to 48x32 at 0, 8; 33.3% of the picture is cut off" in shown


def test_a_snapshot_has_them(referred):
    (referred.parent / "control_3" / "a.png").unlink()
    text = page(open_manifest(read_manifest(referred)), MADE, cards=10, thumbnail=None)
    cards = text[text.index('id="cards"'):]
    assert [unescape(one.replace("<wbr>", "")) for one in re.findall(
        r'<span class="label">Reference \d</span><bdi>(.*?)</bdi>', cards)][:3] == [*FILES]
    assert cards.count('<span class="instead">not here</span>') == 1 and "64x64+48x32+48x32+48x32" in text


def test_a_card_shows_the_first_ones(tmp_path):
    files = {f"{number}.png": saved(Image.new("RGB", (60, 40), (number, 0, 0))) for number in range(6)}
    path = write_small(tmp_path, references=files)
    text = page(open_manifest(read_manifest(path)), MADE, cards=10, thumbnail=None)
    assert text.count('<span class="label">Reference') - 1 == 4 and "6 references, 4 shown" in text
    with viewing_here(path) as running:
        text = running.get().text
        assert text.count('<span class="label">Reference') == 4 and "6 references, 4 shown" in text
