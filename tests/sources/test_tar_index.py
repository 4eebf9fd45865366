"""What is remembered of tars: never wrong, whatever becomes of the tar or of the record, and no torch for it."""

from __future__ import annotations

import ast
import json
import os
import sqlite3
import subprocess
import sys
import time
import zlib
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tarred import member, tar_of
from walking import contents_of, walk_tar

from prep.fs import memo
from prep.fs.blob import Blob, blob_at
from prep.fs.stamps import blob_stamp
from prep.sources import tar_index as listings
from prep.sources import tars
from prep.sources.item import Item
from prep.sources.tar_index import Listings
from prep.sources.walk import walk_source

MEMBERS = ["a/0.jpg", "a/0.TXT", "a/0.mask.png", "1.png", "1.png", "none", "../2.jpg", "b\udcff.jpg", "日.webp"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the memory goes; every tar is as if at rest."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))
    monkeypatch.setattr(memo, "REST_NS", 0)
    return tmp_path / "caches" / "memory"


@pytest.fixture
def tar(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(MEMBERS))
    return path


def records(folder: Path) -> dict[int, bytes]:
    """What is remembered, by number."""
    found: dict[int, bytes] = {}
    for path in folder.glob("tars-*.sqlite"):
        with closing(sqlite3.connect(path)) as table:
            found |= table.execute("SELECT id, value FROM memory").fetchall()
    return found


def replace_record(folder: Path, body: bytes) -> None:
    """Puts another body into the one record, with a checksum that fits its stamp."""
    (path,) = folder.glob("tars-*.sqlite")
    stamp = blob_stamp(Blob(file=str(folder.parent.parent / "a.tar")))[0]
    with closing(sqlite3.connect(path)) as table, table:
        table.execute("UPDATE memory SET value = ?", (memo._CRC.pack(zlib.crc32(body, zlib.crc32(stamp))) + body,))


def listed(path: Path, **options) -> list[int]:
    """Asks for the contents, which must be right; one number for each time the tar was listed for it."""
    made: list[int] = []
    with closing(Listings(**options)) as known:
        found = known.of(blob_at(path), lambda: made.append(1) or contents_of(path))
    assert found == contents_of(path)
    assert [list(parts) for parts in found.groups.values()] == [list(one) for one in contents_of(path).groups.values()]
    return made


def test_a_tar_is_listed_once(folder, tar, tmp_path):
    assert listed(tar) and len(records(folder)) == 1
    assert not listed(tar) and not listed(tar)
    assert listed(tar, trust=False) and not listed(tar)
    tar.rename(tmp_path / "b.tar")  # which changes ctime
    assert listed(tmp_path / "b.tar")
    assert len(list(folder.iterdir())) == 1


def test_items_and_findings_are_the_same(folder, tar, monkeypatch):
    for sidecar in (True, False):
        plain = list(walk_tar(tar, label="x/a.tar", source=3, sidecar=sidecar))
        for _ in range(2):
            found = list(walk_tar(tar, label="x/a.tar", source=3, sidecar=sidecar, listings=Listings()))
            assert found == plain and any(isinstance(one, Item) for one in found)
    with monkeypatch.context() as patch:
        patch.setattr(tars, "read_tar", lambda *_: pytest.fail("the tar was listed again"))
        assert len(list(walk_source(tar, source=0, masks="alpha"))) == len(plain)
    assert list(walk_source(tar, source=0, masks="none", rehash=True))


def test_a_tar_that_was_just_written_is_not_remembered(folder, tar, monkeypatch):
    monkeypatch.setattr(memo, "REST_NS", 2 * 10**9)
    assert listed(tar)
    tar.write_bytes(tar_of([name.replace("jpg", "gif") for name in MEMBERS]))  # within the second, and of the same size
    assert listed(tar) and not folder.exists()
    monkeypatch.setattr(time, "time_ns", lambda: tar.stat().st_ctime_ns + 2 * 10**9 + 1)
    assert listed(tar) and not listed(tar)


def test_a_tar_must_be_at_rest_before_it_is_listed(folder, tar, monkeypatch):
    """That it was for two seconds when it had been listed says nothing of what was written after its start was read."""
    monkeypatch.setattr(memo, "REST_NS", 2 * 10**9)
    changed = tar.stat().st_ctime_ns
    clock = [changed + 10**9, changed + 10**10]
    monkeypatch.setattr(time, "time_ns", lambda: clock.pop(0))
    assert listed(tar)
    monkeypatch.setattr(time, "time_ns", lambda: changed + 10**10)
    assert listed(tar) and not listed(tar)


def test_a_tar_that_changes_while_it_is_listed_is_not_remembered(folder, tar):
    def rewrite():
        found = contents_of(tar)
        tar.write_bytes(tar_of(["new.jpg"]))
        return found

    Listings().of(blob_at(tar), rewrite)
    assert list(contents_of(tar).groups) == ["new"] and listed(tar)


def test_another_tar_in_its_place_is_listed(folder, tar, tmp_path):
    listed(tar)
    stamp, other = tar.stat(), tmp_path / "other.tar"
    other.write_bytes(tar_of([name.replace("jpg", "gif") for name in MEMBERS]))
    assert other.stat().st_size == stamp.st_size
    os.utime(other, ns=(stamp.st_mtime_ns, stamp.st_mtime_ns))
    other.replace(tar)
    assert listed(tar)
    tar.write_bytes(tar_of(MEMBERS))  # the same inode, size and mtime
    os.utime(tar, ns=(stamp.st_mtime_ns, stamp.st_mtime_ns))
    assert listed(tar) and not listed(tar)


def test_nothing_is_remembered_where_ctime_is_creation(folder, tar, monkeypatch):
    monkeypatch.setattr(memo, "ctime_is_reliable", lambda: False)
    assert listed(tar) and listed(tar) and not folder.exists()


@pytest.mark.parametrize("what", ["VERSION", "python"])
def test_other_versions_list_again(folder, tar, monkeypatch, what):
    listed(tar)
    monkeypatch.setattr(*((listings, "VERSION", 99) if what == "VERSION" else ("sys.hexversion", 1)))
    assert listed(tar) and not listed(tar)


@pytest.mark.parametrize("data", [tar_of(["0.jpg"])[:1024] + b"\xff" * 512, b"no tar" * 200, b""])
def test_a_tar_that_is_damaged(folder, tmp_path, data):
    """What could be the disk's fault is asked again."""
    path = tmp_path / "bad.tar"
    path.write_bytes(data)
    listed(path)
    assert bool(listed(path)) == (b"\xff" in data)


def test_a_folder_that_cannot_be_written(folder, tar, monkeypatch):
    folder.parent.mkdir(parents=True)
    folder.touch()
    assert listed(tar) and listed(tar)
    folder.unlink()
    monkeypatch.setattr(listings, "MOST_BYTES", 10)
    assert listed(tar) and not folder.exists()
    monkeypatch.setattr(memo, "user_cache", lambda: None)
    assert listed(tar) and listed(tar)


def test_whoever_stops_in_the_middle_of_a_tar_has_listed_it(folder, tar, monkeypatch):
    walked = walk_source(tar, source=0, masks="none")
    next(walked)
    walked.close()
    assert not listed(tar)


# ---- records that are not as they were made --------------------------------------------------------------------------


def test_any_flipped_bit_costs_a_listing_and_no_more(folder, tar):
    listed(tar)
    ((_, value),) = records(folder).items()
    (path,) = folder.iterdir()
    for place in range(len(value)):
        for bit in (place % 8,):
            with closing(sqlite3.connect(path)) as table, table:
                spoiled = value[:place] + bytes([value[place] ^ 1 << bit]) + value[place + 1 :]
                table.execute("UPDATE memory SET value = ?", (spoiled,))
            assert listed(tar), place
    assert list(records(folder).values()) == [value] and not listed(tar)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=60), place=st.integers(0, 400), cut=st.booleans())
def test_any_damage_costs_a_listing_and_no_more(folder, tar, noise, place, cut):
    listed(tar)
    ((_, value),) = records(folder).items()
    (path,) = folder.iterdir()
    data = value[:place] + noise + (b"" if cut else value[place + len(noise) :])
    with closing(sqlite3.connect(path)) as table, table:
        table.execute("UPDATE memory SET value = ?", (data,))
    assert bool(listed(tar)) == (data != value)


def test_a_record_of_another_tar_is_none(folder, tar, tmp_path):
    listed(tar)
    (first,) = records(folder)
    other = tmp_path / "b.tar"
    other.write_bytes(tar_of(["0.jpg"]))
    listed(other)
    (second,) = set(records(folder)) - {first}
    (path,) = folder.iterdir()
    with closing(sqlite3.connect(path)) as table, table:
        table.execute("UPDATE memory SET value = (SELECT value FROM memory WHERE id = ?) WHERE id = ?", (first, second))
    assert listed(other)


GOOD = [[["0", [["jpg", "0.jpg", 512, 5]]]], [["", "archive-unended", "no end"]]]
NAME, KEY = "a name of the record is not a string", "a key of the record is repeated, or has no members"
PLACE = "a member of the record lies outside the tar"
OUTSIDE = "a member of the record would be unpacked outside its directory"
SAYS = "a finding of the record has an unknown code"
STRANGE = [
    (None, "."), ([], "."), ([[]], "."), ({"groups": 1}, "."), ([[["0", 1]], []], "."),
    ([[], [["", "truncated"]]], "."),
    ([[["0", []]], []], KEY), ([GOOD[0] * 2, []], KEY), ([[[1, [["jpg", "0.jpg", 512, 5]]]], []], NAME),
    *(([[["0", [[*names, 512, 5]]]], []], NAME) for names in ((1, "0.jpg"), ("jpg", 0), ("jpg", None))),
    ([[["\ud800", [["jpg", "0.jpg", 512, 5]]]], []], "surrogates not allowed"),
    *(([[["0", [["jpg", "0.jpg", *where]]]], []], PLACE)
      for where in ((True, 5), (512.0, 5), (512, None), (-1, 5), (512, -1), (1 << 20, 1), (10**30, 5), (0, 10**30))),
    *(([[["0", [["jpg", name, 512, 5]]]], []], OUTSIDE)
      for name in ("../0.jpg", "/0.jpg", "a/../../0.jpg", "c:/0.jpg", "a\\..\\0.jpg")),
    ([[], [["", "no-code", ""]]], SAYS), *(([[], [one]], NAME) for one in ([1, "truncated", ""], ["", [], ""])),
]  # fmt: skip


@pytest.mark.parametrize(("document", "says"), STRANGE, ids=str)
def test_strange_values_are_refused(document, says):
    assert list(listings._parsed(GOOD, 517).groups) == ["0"]
    with pytest.raises((ValueError, TypeError), match=says):
        listings._parsed(document, 2048)


@pytest.mark.parametrize("text", [*(json.dumps(one).encode() for one, _ in STRANGE), b"{", b"\xff", b"[" * 100_000,
                                  b"[" + b" " * 70_000], ids=lambda text: text[:20])  # fmt: skip
def test_a_record_that_says_something_strange_is_none(folder, tar, monkeypatch, text):
    listed(tar)
    replace_record(folder, zlib.compress(text))
    monkeypatch.setattr(listings, "MOST_BYTES", 1 << 16)
    assert listed(tar)


def test_records_have_a_bound(monkeypatch):
    monkeypatch.setattr(listings, "MOST_BYTES", 1 << 16)
    with pytest.raises(ValueError, match="the record has more than"):
        listings._unpacked(zlib.compress(b"[" + b" " * 70_000))


# ---- commands --------------------------------------------------------------------------------------------------------

LOADED = """
import sys
from prep.cli.main import app
from prep.cli.console import run
try:
    run(app, "prep", sys.argv[1:])
except SystemExit as done:
    assert done.code in (0, 1), done.code
finally:
    print("\\n", [name for name in ("torch", "webdataset") if name in sys.modules], file=sys.stderr)
"""


def loaded_by(*words: object) -> list[str]:
    """Which of torch and webdataset a command loads, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", LOADED, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return ast.literal_eval(done.stderr.strip().splitlines()[-1].strip())


@pytest.mark.slow
def test_commands_over_known_tars_load_no_torch(folder, prep, photos, tiny_model, tmp_path):
    files = sorted(path for path in photos.rglob("*") if path.is_file())
    source = tmp_path / "p.tar"
    source.write_bytes(tar_of([member(path.relative_to(photos).as_posix(), path.read_bytes()) for path in files]))
    encode = ["encode", source, "--model", tiny_model, "--resolution", 64, "--step", 16, "--cache", tmp_path / "cache",
              "-o", tmp_path / "m.json"]
    assert "webdataset" in loaded_by("scan", source, "--rehash")
    first = prep(*encode, "--json")
    assert first.code == 0, first.err
    assert len(records(folder)) == 1
    for words in (["scan", source], encode, ["init", source, "-o", tmp_path / "dataset.toml"],
                  ["bucket", source, "--resolution", 64, "--batch-size", 2],
                  ["mask", source, "--with", "alpha", "-o", tmp_path / "masks"]):
        assert loaded_by(*words) == [], words
    assert "webdataset" in loaded_by(*encode, "--rehash")
