"""`prep encode` where nothing has changed makes no plan, and all comes out as if it had; any change leads to one."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from pictures import draw, draw_mask
from tarred import member, tar_of

from prep.dataset import ingest
from prep.dataset.reading import NotRead
from prep.encode import run, unchanged
from prep.fs import memo
from prep.fs.memo import memory_folder


@pytest.fixture(autouse=True)
def memories(tmp_path, monkeypatch):
    """An empty memory, which trusts every stamp."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))
    monkeypatch.setattr(memo, "REST_NS", 0)


@pytest.fixture
def plans(monkeypatch):
    """What was planned: an entry for each run that read pictures."""
    made = []
    complete = run.complete
    monkeypatch.setattr(run, "complete", lambda begun: made.append(begun) or complete(begun))
    return made


def folder(root: Path) -> list[str]:
    return [str(root)]


def tar(root: Path) -> list[str]:
    members = [member(path.name, path.read_bytes()) for path in sorted(root.iterdir())]
    root.with_suffix(".tar").write_bytes(tar_of(members))
    return [str(root.with_suffix(".tar"))]


def table(root: Path) -> list[str]:
    rows = []
    for path in sorted(root.glob("*.txt")):
        rows.append(json.dumps({"file_name": f"{path.stem}.png", "text": path.read_text()}))
        path.unlink()
    (root / "metadata.jsonl").write_text("\n".join(rows))
    return [str(root)]


def several(root: Path) -> list[str]:
    draw(root.parent / "more" / "0.png", (96, 96), seed=90).with_suffix(".txt").write_text("one of {two|three} others")
    recipe = root.parent / "dataset.toml"
    recipe.write_text('[caption]\nwildcards = true\nvariants = 2\n[[source]]\npath = "photos"\nrepeats = 2\n'
                      '[[source]]\npath = "more"\nrole = "prior"\n')
    return [str(recipe)]


def masked(root: Path) -> list[str]:
    return [str(root), "--mask", "sidecar", "--crop", "focus", "--validation", "0.3"]


def transparent(root: Path) -> list[str]:
    return [str(root), "--mask", "alpha"]


def defective(root: Path) -> list[str]:
    (root / "9.png").write_bytes(b"no picture")
    (root / "orphan.txt").write_text("a caption without a picture")
    (root / "1.txt").write_text("far too long a caption, " * 40)
    (root / "3.txt").write_bytes(b"\xff\xfe\x00")
    return [str(root)]


SOURCES = [folder, tar, table, several, masked, transparent, defective]


@pytest.fixture
def words(tiny_model, tmp_path):
    return ["--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json", "--resolution", "96",
            "--step", "16", "--json"]


@pytest.fixture
def encode(prep, words, photos, plans):
    """`encode(*more)`: the document of a run, and whether it made a plan."""
    def go(*more, source=(photos,)):
        plans.clear()
        done = prep("encode", *source, *words, *more)
        assert done.code == 0, done.err
        return {**done.json, "seconds": 0, "said": done.err}, bool(plans)

    return go


@pytest.fixture
def settled(encode):
    """Two runs: the second has nothing to encode."""
    assert encode()[1] and encode()[1]


@pytest.mark.few("several")
@pytest.mark.parametrize("kind", SOURCES)
def test_all_is_as_if_a_plan_were_made(kind, encode, photos, tmp_path, monkeypatch):
    source = kind(photos)
    encode(source=source)
    planned, first = encode(source=source)
    manifest, tables = (tmp_path / "m.json").read_bytes(), sorted((tmp_path / "cache").rglob("*.arrow"))
    again, second = encode(source=source)
    assert (first, second) == (True, False)
    assert again == planned and sum(again["reused"].values()) and not sum(again["encoded"].values())
    assert (tmp_path / "m.json").read_bytes() == manifest
    assert sorted((tmp_path / "cache").rglob("*.arrow")) == tables
    monkeypatch.setattr(unchanged, "_name", lambda begun: None)
    assert encode(source=source) == (planned, True)


def replace_with_same_size(root: Path) -> None:
    data = bytearray((root / "0.png").read_bytes())
    stamp = (root / "0.png").stat().st_mtime_ns
    other = (root / "6.png").read_bytes()
    (root / "0.png").write_bytes(other[: len(data)].ljust(len(data), b"\0"))  # its end is cut or padded
    os.utime(root / "0.png", ns=(stamp, stamp))


CHANGES = {
    "another caption": lambda root: (root / "3.txt").write_text("another caption"),
    "a caption removed": lambda root: (root / "3.txt").unlink() or (root / "3.caption").write_text("from another file"),
    "another picture": lambda root: draw(root / "3.png", (140, 66), seed=77),
    "another picture of its size and mtime": replace_with_same_size,
    "a picture more": lambda root: draw(root / "8.png", (96, 96), seed=8).with_suffix(".txt").write_text("one more"),
    "a picture less": lambda root: (root / "7.png").unlink(),
    "a picture renamed": lambda root: (root / "7.png").rename(root / "17.png") and (
        (root / "7.txt").rename(root / "17.txt")),
    "another mask": lambda root: draw_mask(root / "2-masklabel.png", (144, 64)).touch(),
    "a mask less": lambda root: (root / "2-masklabel.png").unlink(),
    "a finding more": lambda root: (root / "orphan.txt").write_text("a caption without a picture"),
}


@pytest.mark.few("another caption", "another picture of its size", "a picture less", "a mask less")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_pictures_leads_to_a_plan(change, settled, encode, photos, tmp_path, monkeypatch):
    before = (tmp_path / "m.json").read_bytes()
    CHANGES[change](photos)
    found, planned = encode()
    assert planned
    after = (tmp_path / "m.json").read_bytes()
    assert (after == before) == (change == "another mask")  # which has the same bytes, and another stamp
    monkeypatch.setattr(unchanged, "_name", lambda begun: None)
    shutil.rmtree(tmp_path / "caches")
    assert encode()[0]["samples"] == found["samples"] and (tmp_path / "m.json").read_bytes() == after


@pytest.mark.few("more0", "more3")
@pytest.mark.parametrize("more", [("--validation", "0.4"), ("--resolution", "64"), ("--crop", "random"),
                                  ("--rehash",), ("--recheck",), ("--retry-rejects",), ("--mask", "none")])
def test_other_options_lead_to_a_plan(more, settled, encode):
    assert encode(*more)[1]


def lose_a_shard(root: Path) -> None:
    shutil.rmtree(next(path for path in (root / "cache" / "shards").glob("*/*")))


def lose_a_table(root: Path) -> None:
    next(root.joinpath("cache", "tables").rglob("*.arrow")).unlink()


def spoil_a_table(root: Path) -> None:
    for path in root.joinpath("cache", "tables").rglob("*.arrow"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)


def lose_the_manifest(root: Path) -> None:
    (root / "m.json").unlink()


def spoil_the_manifest(root: Path) -> None:
    (root / "m.json").write_bytes((root / "m.json").read_bytes().replace(b"latent", b"letant", 1))


@pytest.mark.few("lose_a_shard")
@pytest.mark.parametrize("change", [lose_a_shard, lose_a_table, spoil_a_table, lose_the_manifest, spoil_the_manifest])
def test_what_is_lost_leads_to_a_plan_that_mends_it(change, settled, encode, tmp_path):
    whole = (tmp_path / "m.json").read_bytes()
    change(tmp_path)
    assert encode()[1]
    assert (tmp_path / "m.json").read_bytes() == whole
    encode()
    assert not encode()[1]


def test_files_that_may_change_without_a_trace_are_never_taken_as_unchanged(encode, monkeypatch):
    encode()
    monkeypatch.setattr(memo, "REST_NS", 1 << 60)
    assert encode()[1] and encode()[1]


def test_a_file_that_could_not_be_read_is_asked_for_again(encode, photos, monkeypatch):
    def failing(self, kind, data):
        raise NotRead("decoder-crashed", "its decoder ended")

    encode()
    (photos / "2.txt").write_text("read anew")
    monkeypatch.setattr(ingest.FactReader, "read", failing)
    for _ in range(2):
        found, planned = encode()
        assert planned and [one["code"] for one in found["rejected"]] == ["decoder-crashed"]


def test_another_version_of_the_code_or_of_a_library_plans_anew(settled, encode, monkeypatch):
    assert not encode()[1]
    for name in ("_code", "decoders", "version"):
        with monkeypatch.context() as patched:
            patched.setattr(unchanged, name, lambda *_: "another")
            assert encode()[1]
    assert not encode()[1]


def test_after_a_week_a_plan_renews_what_is_remembered(settled, encode, monkeypatch):
    assert not encode()[1]
    today = unchanged._today()
    monkeypatch.setattr(unchanged, "_today", lambda: today + memo.REFRESH)
    assert encode()[1] and not encode()[1]


def test_a_damaged_memory_leads_to_a_plan(settled, encode):
    (store,) = memory_folder().glob("files-*.sqlite")
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE memory SET value = substr(value, 1, length(value) - 1) || x'00'")
    connection.close()
    assert encode()[1]
