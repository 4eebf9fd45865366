"""`prep encode` again: what did not change is not opened, what did is, and the manifest is the same to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prep.cache.reader import Reader
from prep.cache.records import RowRef
from prep.cache.store import Cache
from prep.cli.ticker import Ticker
from prep.encode.manifest.mask_coverage import coverage
from prep.fs import memo as facts
from prep.fs.memo import Memo, memory_folder
from prep.geometry import Placement
from prep.images.mask import decode_mask
from prep.manifest.samples import Sample, View, open_samples
from prep.manifest.tables import SAMPLES, read_table

_watching: list[list[str]] = []  # who is told of files that this process opens, by whatever call


@cache
def add_hook() -> None:
    """Once: there is no way to take a hook back."""
    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and _watching and isinstance(args[0], str | os.PathLike):
            for seen in _watching:
                seen.append(os.fspath(args[0]))

    sys.addaudithook(watch)


@pytest.fixture(autouse=True)
def memories(tmp_path, monkeypatch):
    """An empty memory."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))


@pytest.fixture
def words(photos, tiny_model, tmp_path):
    return ["encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
            "--resolution", "96", "--step", "16", "--mask", "sidecar", "--json"]


@pytest.fixture
def encoded(prep, words, monkeypatch):
    """A first run, after which every stamp is trusted."""
    monkeypatch.setattr(facts, "REST_NS", 0)
    result = prep(*words)
    assert result.code == 0, result.err
    return result.json


def opened_by(command, photos, *, hidden: bool = False) -> set[str]:
    """The files of the source that a command opens, by name; it must end well."""
    add_hook()
    seen: list[str] = []
    _watching.append(seen)
    try:
        done = command()
    finally:
        _watching.remove(seen)
    assert done.code == 0, done.err
    files = [Path(name) for name in seen]
    assert hidden or any(path.name.startswith("files-") for path in files), "the hook sees them"
    return {path.name for path in files if path.is_file() and photos in path.parents}


@pytest.fixture
def opened(words, photos, prep):
    """`opened(*options)`: the files of the source that one more run opens, by name; it must end well and make nothing.
    """
    def go(*options: str) -> set[str]:
        def run():
            done = prep(*words, *options)
            assert sum(done.json["encoded"].values()) == 0
            return done

        return opened_by(run, photos, hidden="--rehash" in options)

    return go


def test_a_second_run_opens_no_picture_caption_or_mask(encoded, opened, photos, tmp_path):
    whole = (tmp_path / "m.json").read_bytes()
    assert opened() == set()
    assert (tmp_path / "m.json").read_bytes() == whole
    assert opened("--rehash") == {path.name for path in photos.iterdir()}
    assert (tmp_path / "m.json").read_bytes() == whole


def test_only_what_changed_is_opened(encoded, opened, photos, tmp_path):
    whole = (tmp_path / "m.json").read_bytes()
    changed = ["1.png", "3.txt", "2-masklabel.png"]
    for name in changed:
        os.utime(photos / name, ns=(0, 0))  # the same bytes, and a stamp that says nothing of them
    assert opened() == set(changed)
    assert (tmp_path / "m.json").read_bytes() == whole


@pytest.mark.slow
def test_without_facts_everything_is_opened_and_the_manifest_is_the_same(encoded, words, photos, tmp_path):
    whole = (tmp_path / "m.json").read_bytes()
    (store,) = memory_folder().glob("files-*")
    store.write_bytes(b"SQLite format 3\0 and then nothing of that kind")
    done = subprocess.run([sys.executable, "-c", "from prep.cli.main import main; main()", *map(str, words)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m.json").read_bytes() == whole


def test_an_edited_caption_is_a_new_row_and_no_other(encoded, words, prep, photos, tmp_path):
    (photos / "3.txt").write_text("another caption")
    result = prep(*words)
    assert result.json["encoded"] == {"latent": 0, "mask": 0, "text": 1}


@pytest.mark.parametrize(("data", "code"), [(b"\xff\xfe\x00", "caption-encoding"),
                                            (b"a\x00b", "caption-control-characters")])
def test_a_bad_caption_is_remembered_as_bad(words, prep, photos, monkeypatch, data, code):
    monkeypatch.setattr(facts, "REST_NS", 0)
    (photos / "3.txt").write_bytes(data)
    first = prep(*words)
    monkeypatch.setattr(facts, "read_blob", lambda blob: pytest.fail(f"{blob} was read"))
    again = prep(*words)
    assert [one["code"] for one in first.json["rejected"]] == [code]
    assert again.json["rejected"] == first.json["rejected"] and again.json["samples"] == first.json["samples"]


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """The rows that are read from shards."""
    found: list[RowRef] = []
    real = Reader.read_batch

    def read_batch(self, out, array, refs):
        found.extend(refs)
        return real(self, out, array, refs)

    monkeypatch.setattr(Reader, "read_batch", read_batch)
    return found


def test_no_mask_row_is_read_twice(encoded, words, prep, photos, tmp_path, reads):
    whole = (tmp_path / "m.json").read_bytes()
    assert prep(*words).code == 0 and reads == []
    (store,) = memory_folder().glob("files-*")
    store.unlink()
    assert prep(*words).code == 0 and len(reads) == 3  # the masks of the pictures 0, 2 and 5
    assert (tmp_path / "m.json").read_bytes() == whole


def test_coverage_is_the_mean_of_the_mask(encoded, photos, tmp_path):
    document = json.loads((tmp_path / "m.json").read_text())
    columns = open_samples(read_table(Cache(root=tmp_path / "cache"), document["tables"]["samples"], SAMPLES))
    found = {columns.name(place): float(columns.coverage[place]) for place in range(len(columns))}
    assert {name for name, mean in found.items() if not np.isnan(mean)} == {"0.png", "2.png", "5.png"}
    for name in ("0.png", "2.png", "5.png"):
        mask = np.asarray(decode_mask((photos / name.replace(".png", "-masklabel.png")).read_bytes()))
        assert found[name] == pytest.approx(mask.mean() / 255, abs=0.06)  # cropped and scaled, but much the same


class Shelf:
    """A reader of one shard of 150 masks, and samples on it."""

    SHARD = "ab" * 32

    def __init__(self) -> None:
        self.rows = np.random.default_rng(0).integers(0, 256, (150, 1, 5, 7), dtype=np.uint8)
        self.read: list[int] = []

    def array_info(self, shard, array):
        from prep.arrays import ArraySpec

        return ArraySpec(name=array, dtype="uint8", shape=self.rows.shape[1:]), len(self.rows)

    def read_batch(self, out, array, refs):
        assert array == "mask" and {ref.shard for ref in refs} == {self.SHARD}
        out[:] = [self.rows[ref.row].reshape(-1) for ref in refs]
        self.read += [ref.row for ref in refs]

    def ask(self, known: Memo, rows) -> dict[str, float]:
        """What is said of these rows' samples; the means must be those of the rows."""
        place = Placement(scaled=(7, 5), crop=(0, 0), bucket=(7, 5))
        samples = [Sample(id=f"id{row}", name="", source=0, role="train", picture="", size=(7, 5), bucket=(7, 5),
                          views=(View(placement=place, latent="", mask=None if row is None else f"mask{row}"),),
                          texts=()) for row in [*rows, None]]
        refs = {f"mask{row}": RowRef(shard=self.SHARD, row=row) for row in rows}
        self.read = []
        found = coverage(self, known, samples, refs)
        assert found == {f"id{row}": float(self.rows[row].mean() / 255) for row in rows}
        return found


@pytest.fixture
def shelf():
    return Shelf()


def test_rows_that_were_not_read_before_are_read_and_added(shelf, tmp_path):
    known = Memo(tmp_path / "files.sqlite")
    shelf.ask(known, range(3, 9))
    assert shelf.read == [3, 4, 5, 6, 7, 8]
    known.save()
    again = Memo(tmp_path / "files.sqlite")
    shelf.ask(again, range(149, 0, -1))
    assert shelf.read == [1, 2, *range(9, 150)]
    again.save()
    shelf.ask(Memo(tmp_path / "files.sqlite"), range(1, 150))
    assert shelf.read == []
    shelf.ask(Memo(tmp_path / "files.sqlite", trust=False), [0])
    assert shelf.read == [0]


@pytest.mark.parametrize("noted", [b"", b"1234567", b"12345678", bytes(8 * 12)])
def test_what_is_remembered_of_a_shard_of_other_rows_is_not_used(shelf, noted):
    known = Memo(None)
    known.get_digest = lambda kind, digest: noted
    shelf.ask(known, [100])
    assert shelf.read == [100]


def test_a_second_preview_of_buckets_opens_only_what_changed(prep, photos, monkeypatch):
    monkeypatch.setattr(facts, "REST_NS", 0)
    bucket = partial(prep, "bucket", photos, "--json")
    first = bucket()
    assert opened_by(bucket, photos) == set() and bucket().json == first.json
    (photos / "1.txt").write_text("another caption")
    assert opened_by(bucket, photos) == {"1.txt"}


def test_each_stage_of_a_run_that_makes_nothing_is_named(encoded, words, photos, prep, monkeypatch):
    stages = []
    opened_stage = Ticker.__init__

    def named(self, title, *settings, **options):
        stages.append(title)
        opened_stage(self, title, *settings, **options)

    monkeypatch.setattr(Ticker, "__init__", named)
    assert prep(*words).code == 0
    assert [stage for stage in stages if stage != "counting tokens"] == [
        "hashing the model", "listing", "reading", "planning", "looking up rows",
        "writing the manifest"]
    stages.clear()
    assert prep(*words).code == 0 and stages == ["hashing the model", "listing", "checking the cache"]
    stages.clear()
    assert prep("bucket", photos).code == 0 and stages == ["reading", "planning"]
