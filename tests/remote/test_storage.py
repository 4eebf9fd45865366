"""Documents at a place: what holds on this computer holds in a store."""

from __future__ import annotations

import os

import pytest

from prep.errors import PathError
from prep.fs.paths import check_replaceable
from prep.fs.place import place_of
from prep.fs.remote.storage import files_in, put, read, read_start
from prep.fs.text import TooLarge

KINDS = ("here", "store")


@pytest.fixture(params=KINDS)
def place(request, store, tmp_path):
    (tmp_path / "here").mkdir()
    return place_of(tmp_path / "here" / "a b.json" if request.param == "here" else f"{store.url}/a b.json")


def test_a_document_is_written_and_read(place):
    with pytest.raises(FileNotFoundError):
        read(place, 100)
    for data in (b"first", b"second, longer", b"3rd", b""):
        put(place, data)
        assert read(place, len(data)) == data == read(place, 100)
    put(place, b"x" * 101)
    with pytest.raises(TooLarge, match="it has more than 100 bytes"):
        read(place, 100)


def test_files_are_listed_and_begun(place, tmp_path):
    """The first so many with wanted names, directly in a place; on a disk no pipe or directory, and links are followed.
    """
    for name in ("c.json", "b.json", "a.json", "b.txt", "deep/d.json"):
        (tmp_path / "here" / "deep").mkdir(exist_ok=True)
        put(place.parent / name, name.encode() * 9)
    (tmp_path / "here" / "e.json").symlink_to("gone")
    (tmp_path / "here" / "f.json").mkdir()
    os.mkfifo(tmp_path / "here" / "g.json")
    folder, wanted = place.parent, lambda name: name.endswith(".json")
    assert files_in(folder, wanted, 100) == {"a.json": 54, "b.json": 54, "c.json": 54}
    assert list(files_in(folder, wanted, 2)) == ["a.json", "b.json"]
    assert read_start(folder / "a.json", 4) == b"a.js" and read_start(folder / "a.json", 100) == b"a.json" * 9
    with pytest.raises(FileNotFoundError):
        read_start(folder / "gone.json", 4)


def test_what_is_there_is_not_written_again(place, store, monkeypatch):
    put(place, b"data")
    puts = store.proxy.count("PUT")
    monkeypatch.setattr("prep.fs.remote.storage.write_atomic", None)
    put(place, b"data")
    # A store is asked to create it, which it refuses: so nobody else's object is replaced in between.
    assert read(place, 10) == b"data" and store.proxy.count("PUT") - puts in (0, 1)


def test_only_ones_own_kind_is_replaced(place):
    check_replaceable(place, "list", lambda start: start.startswith(b"list"))
    put(place, b"list of " + b"x" * 2000)
    check_replaceable(place, "list", lambda start: start.startswith(b"list") and len(start) == 1024)
    put(place, b"photo")
    with pytest.raises(PathError, match=r"a b\.json exists and is no list, so it is not replaced"):
        check_replaceable(place, "list", lambda start: start.startswith(b"list"))


def test_names_below_a_place(place, store, tmp_path):
    """Both are written as `Path` writes them, and lead to each other."""
    inner = place.parent / "deep" / "x.json"
    assert inner.relative_to(place.parent).as_posix() == "deep/x.json" and str(place).endswith("/a b.json")
    assert place_of(str(place)) == place and place.parent.absolute() == place.parent
