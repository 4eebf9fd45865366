"""Files in open directories: no link leads out, also one that comes between the check and the write; and locks."""

from __future__ import annotations

import stat

import pytest

from prep.fs import below
from prep.fs.below import Below
from prep.fs.untrusted import NotRegularFile


@pytest.fixture(params=["by descriptor", "by path"], autouse=True)
def way(request, monkeypatch):
    if request.param == "by path":
        monkeypatch.setattr(below, "by_descriptor", lambda: False)
    return request.param


def test_files_are_written_read_and_removed(tmp_path):
    place = Below(tmp_path / "root", ("a", "b"))
    with pytest.raises(FileNotFoundError), place.opened():
        pass
    with place.opened(make=True) as folder:
        folder.write("x", b"one")
        (folder.path / "x").chmod(0o640)
        folder.write("x", b"two")
        assert not folder.create("x", b"three") and folder.create("y", b"four")
        assert folder.read("x", 10) == b"two" and sorted(folder.names()) == ["x", "y"]
        assert stat.S_IMODE(folder.status("x").st_mode) == 0o640 and stat.S_ISDIR(folder.status().st_mode)
        folder.remove("y")
        folder.remove("y")
        with pytest.raises(NotRegularFile, match="has 3 bytes, expected at most 2"):
            folder.read("x", 2)
    assert place.path == tmp_path / "root" / "a" / "b" and [one.name for one in place.path.iterdir()] == ["x"]


def test_links_lead_nowhere(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("untouched")
    root = tmp_path / "root"
    (root / "plain").mkdir(parents=True)
    (root / "linked").symlink_to(outside)
    (root / "file").write_text("")
    (root / "plain" / "x").symlink_to(outside / "x")
    for name in ("linked", "file"):
        for make in (False, True):
            with pytest.raises(NotRegularFile), Below(root, (name,)).opened(make=make):
                pass
    with Below(root, ("plain",)).opened() as folder:
        for call in (lambda: folder.read("x", 100), lambda: folder.write("x", b"through")):
            with pytest.raises(NotRegularFile, match="is a link"):
                call()
        assert not folder.create("x", b"through")
        folder.remove("x")
    assert [one.name for one in outside.iterdir()] == ["x"] and (outside / "x").read_text() == "untouched"


def test_a_directory_that_is_exchanged_for_a_link(tmp_path, way):
    if way == "by path":
        pytest.skip("paths alone cannot tell")
    outside = tmp_path / "outside"
    outside.mkdir()
    with Below(tmp_path / "root", ("sub",)).opened(make=True) as folder:
        folder.write("x", b"before")
        folder.path.rename(tmp_path / "moved")
        folder.path.symlink_to(outside)
        folder.write("x", b"after")
        assert folder.create("y", b"new") and folder.read("y", 10) == b"new"
        folder.remove("y")
    assert list(outside.iterdir()) == [] and (tmp_path / "moved" / "x").read_bytes() == b"after"


def test_one_at_a_time(tmp_path):
    place = Below(tmp_path)
    with place.opened() as one, place.opened() as other:
        with one.locked(0), pytest.raises(TimeoutError, match="another program is saving there"), other.locked(0.02):
            pass
        with other.locked(0):
            pass
