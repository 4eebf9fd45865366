"""Without the extra of a format, each such picture is told with the way out; with it, nothing is left of that."""

from __future__ import annotations

import sys
from importlib.metadata import version

import numpy as np
import pytest
from PIL import Image
from plugged import boxed, heic, jxl
from tarred import member, tar_of

from prep.dataset.ingest import ingest
from prep.dataset.reading import FactReader
from prep.findings import Finding
from prep.fs import memo as facts
from prep.images.decode import read_header
from prep.images.formats.parts import BadPicture, NoDecoder
from prep.images.mask import alpha_of, decode_mask
from prep.recipe.load import load_recipe
from prep.scan import memo as remembered
from prep.scan.duplicates.identity import identify
from prep.sources.walk import walk_source
from prep.workers import pool

pytest.importorskip("pillow_heif")
pytest.importorskip("pillow_jxl")

HEIC_SAYS = ("is HEIC, which needs the package pillow-heif, which is not installed; "
             "left out: pip install 'latentry[heic]' reads it")
JXL_SAYS = ("is JPEG XL, which needs the package pillow-jxl-plugin, which is not installed; "
            "left out: pip install 'latentry[jxl]' reads it")
SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu", "--json")


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)).resize((96, 96))


HEIC, JXL = heic(picture(1)), jxl(picture(2))


class Plugins:
    """Whether the plugins are there, in this process and in workers that it starts."""

    def __init__(self, monkeypatch, folder):
        self._monkeypatch, self._folder = monkeypatch, folder
        folder.mkdir()
        for name in ("pillow_heif", "pillow_jxl"):
            (folder / f"{name}.py").write_text("raise ImportError('not installed')\n")

    def off(self):
        for name in ("pillow_heif", "pillow_jxl"):
            self._monkeypatch.setitem(sys.modules, name, None)
        self._monkeypatch.setenv("PYTHONPATH", str(self._folder))

    def on(self):
        self._monkeypatch.undo()
        rest(self._monkeypatch)


def rest(monkeypatch):
    """As if all files had been at rest for long, so that what is found in them is remembered."""
    monkeypatch.setattr(facts, "REST_NS", -(10**12))


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    rest(monkeypatch)
    return Plugins(monkeypatch, tmp_path / "without")


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    picture(3).save(root / "good.png")
    for name, data in (("phone.heic", HEIC), ("named.jpg", HEIC), ("small.jxl", JXL),
                       ("boxed.png", boxed((b"jxlc", JXL)))):
        (root / name).write_bytes(data)
    for path in list(root.iterdir()):
        path.with_suffix(".txt").write_text(path.stem)
    return root


MISSING = {"phone.heic": HEIC_SAYS, "named.jpg": HEIC_SAYS, "small.jxl": JXL_SAYS, "boxed.png": JXL_SAYS}


@pytest.mark.parametrize(("data", "says"), [(HEIC, HEIC_SAYS), (JXL, JXL_SAYS), (boxed((b"jxlc", JXL)), JXL_SAYS)],
                         ids=["HEIC", "JPEG XL", "boxed"])
def test_the_message_names_the_extra(plugins, data, says):
    plugins.off()
    for read in (read_header, alpha_of, decode_mask):
        with pytest.raises(NoDecoder) as caught:
            read(data)
        assert (caught.value.code, caught.value.detail) == ("unsupported-format", says)
    plugins.on()
    assert read_header(data).size == (96, 96)


def test_a_plugin_without_its_library_is_as_good_as_none(monkeypatch):
    import pillow_heif

    def lacks(*_, **__):
        raise ImportError("libheif.so: cannot open shared object file")

    monkeypatch.setattr(pillow_heif, "HeifFile", lacks)
    with pytest.raises(NoDecoder, match="needs the package pillow-heif"):
        read_header(HEIC)


def test_a_damaged_file_is_told_as_such_all_the_same(plugins):
    plugins.off()
    with pytest.raises(BadPicture, match="the HEIC box at byte"):
        read_header(HEIC[:-100])


def test_a_scan_tells_each_once_as_an_error_and_forgets_it(prep, photos, plugins):
    """Workers decode; what they found is remembered, but not this."""
    plugins.off()
    first = prep("scan", photos, "--json", "--quiet")
    assert first.code == 1
    told = [(one["path"], one["severity"], one["detail"]) for one in first.json["findings"]
            if one["code"] == "unsupported-format"]
    assert sorted(told) == sorted((path, "error", says) for path, says in MISSING.items())
    assert (first.json["pictures"], first.json["samples"]) == (5, 1)
    plugins.on()
    second = prep("scan", photos, "--json", "--quiet", "--ignore", "exact-duplicate", "--ignore", "pixel-duplicate")
    assert {(one["path"], one["code"]) for one in second.json["findings"]} == {
        ("named.jpg", "wrong-extension"), ("boxed.png", "wrong-extension")}
    assert (second.code, second.json["samples"]) == (0, 5)


def test_a_scan_with_the_extras_is_not_believed_without_them(prep, photos, plugins):
    """Environments share what is remembered, and not what is installed."""
    with_them = prep("scan", photos, "--json", "--quiet").json
    plugins.off()
    without = prep("scan", photos, "--json", "--quiet").json
    assert (with_them["samples"], without["samples"]) == (5, 1)
    assert {one["path"]: one["detail"] for one in without["findings"]} == MISSING
    plugins.on()
    assert prep("scan", photos, "--json", "--quiet").json == with_them


def test_another_version_of_a_decoder_looks_again(prep, photos, monkeypatch):
    rest(monkeypatch)
    first = prep("scan", photos, "--json", "--quiet").out
    monkeypatch.setattr("prep.images.plugins.version",
                        lambda package: "99" if package == "pillow-heif" else version(package))
    began, start = [], pool._start
    monkeypatch.setattr("prep.workers.pool._start", lambda command: (began.append(1), start(command))[1])
    assert prep("scan", photos, "--json", "--quiet").out == first and began
    began.clear()
    assert prep("scan", photos, "--json", "--quiet").out == first and not began


def test_an_encoding_asks_another_version_of_a_decoder_again(photos, tmp_path, monkeypatch):
    """What the old one could not read, too; captions are not read again for that."""
    rest(monkeypatch)
    (photos / "bad.heic").write_bytes(HEIC[:-50])
    store, asked = tmp_path / "files.sqlite", []
    read = FactReader.read
    monkeypatch.setattr(FactReader, "read", lambda self, kind, data: (
        asked.append(kind), read(self, kind, data))[1])
    counts = []
    for number in ("1", "1", "2", "2"):
        monkeypatch.setattr("prep.images.plugins.version", lambda _, number=number: number)
        known = facts.Memo(store)
        found = ingest(load_recipe(photos, choices={"caption.missing": "empty"}), known, jobs=1)
        known.save()
        counts.append((asked.count("picture"), known.read, [one.path for one in found.findings]))
        asked.clear()
    assert counts == [(6, 11, ["bad.heic"]), (0, 0, ["bad.heic"]), (6, 6, ["bad.heic"]), (0, 0, ["bad.heic"])]


def test_all_pixels_are_those_of_one_decoder(tmp_path, monkeypatch):
    """What another one made of the same file is compared with nothing."""
    seen = identify(HEIC, picture(1))[0]
    for number, known in (("1", ""), ("1", "ab"), ("2", ""), ("1", "ab")):
        monkeypatch.setattr("prep.images.plugins.version", lambda _, number=number: number)
        memory = remembered.ScanMemo(remembered.usual_path())
        assert memory.pixels(seen) == known
        memory.note_pixels(seen, "ab" if number == "1" else "")
        memory.close()


def test_members_of_a_tar(prep, tmp_path, plugins):
    tar = tmp_path / "a.tar"
    members = {"0.heic": HEIC, "0.txt": b"x", "1.JXL": JXL, "1.txt": b"x"}
    tar.write_bytes(tar_of(member(name, data) for name, data in members.items()))
    found = list(walk_source(tar, source=0, masks="none"))
    assert not [one for one in found if isinstance(one, Finding)]
    assert [one.name for one in found] == ["a.tar/0.heic", "a.tar/1.JXL"]
    plugins.off()
    report = prep("scan", tar, "--json", "--quiet").json
    assert {(one["path"], one["detail"]) for one in report["findings"]} == {
        ("a.tar/0.heic", HEIC_SAYS), ("a.tar/1.JXL", JXL_SAYS)}
    plugins.on()
    assert prep("scan", tar, "--json", "--quiet").json["findings"] == []


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    def go(*options):
        result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                      *SMALL, *options)
        assert result.code == 0, result.err
        return result.json, {one["path"]: one["detail"] for one in result.json["rejected"]}

    return go


@pytest.mark.slow
def test_an_encoding_rejects_each_by_name_and_takes_it_up_by_itself_later(encode, plugins):
    plugins.off()
    for _ in range(2):
        document, rejected = encode()
        assert rejected == MISSING
    assert document["encoded"]["latent"] == 0
    plugins.on()
    document, rejected = encode()
    assert rejected == {} and document["encoded"]["latent"] == 3  # two have the same bytes
    assert encode()[0]["encoded"]["latent"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    pytest.param((), id="read when its row is made"),
    pytest.param(("--crop", "focus"), id="read at first", marks=pytest.mark.slow)])
def test_a_mask_of_such_a_format(encode, photos, tmp_path, plugins, options):
    for path in photos.glob("*"):
        if path.stem != "good":
            path.unlink()
    picture(4).save(photos / "other.png")
    (photos / "other.txt").write_text("another")
    masks = tmp_path / "masks"
    masks.mkdir()
    white = Image.new("L", (96, 96), 0)
    white.paste(255, (0, 0, 48, 96))
    (masks / "good.heic").write_bytes(heic(white))
    white.save(masks / "other.png")
    plugins.off()
    document, rejected = encode("--mask", masks, *options)
    assert list(rejected) == ["good.png"] and rejected["good.png"].endswith(HEIC_SAYS)
    assert "good.heic" in rejected["good.png"]
    plugins.on()
    document, rejected = encode("--mask", masks, *options)
    assert rejected == {} and document["encoded"]["mask"] == 1


def test_a_folder_of_nothing_else_stops_with_the_way_out(prep, photos, tiny_model, tmp_path, plugins):
    plugins.off()
    (photos / "good.png").unlink()
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json")
    assert result.code == 8
    assert f"; 4 pictures cannot be used, the first, boxed.png, {JXL_SAYS}" in result.err


def test_prep_init_counts_them(prep, photos, tmp_path, plugins):
    plugins.off()
    told = prep("init", photos, "-o", tmp_path / "dataset.toml")
    assert told.code == 0 and "note: 4 of 5 files cannot be read as pictures; prep scan " in told.err
    assert "Files that cannot be read as pictures: 4." in (tmp_path / "dataset.toml").read_text()
    plugins.on()
    assert "note:" not in prep("init", photos, "-o", tmp_path / "dataset.toml", "--force").err
    assert "cannot be read" not in (tmp_path / "dataset.toml").read_text()
