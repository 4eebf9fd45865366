"""`prep clean`: what is remembered goes, and nothing else."""

from __future__ import annotations

import os

import pytest

from prep.fs import memo
from prep.fs.memo import Memo, memo_path, memory_folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A user's cache directory with memories of two kinds, files of earlier versions, and files of others."""
    path = tmp_path / "caches"
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(path))
    for kind, version in (("scan", "1"), ("scan", "2"), ("tars", "1")):
        known = Memo(memo_path(kind, version))
        known.note(b"name", b"value")
        known.close()
    (path / "tars").mkdir()
    (path / "tars" / ("ab" * 16)).write_bytes(b"of an earlier version")
    (path / "scan.sqlite").write_bytes(b"so is this")
    for other in ("mine.sqlite", "tars/mine", "memory/mine.sqlite", "memory/scan-mine.sqlite"):
        (path / other).write_bytes(b"mine")
    (path / "tars" / ("cd" * 16)).symlink_to(path / "mine.sqlite")
    return path


def names(root) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}


MINE = {"mine.sqlite", "tars/mine", "memory/mine.sqlite", "memory/scan-mine.sqlite", f"tars/{'cd' * 16}"}


def test_what_is_remembered_goes_and_nothing_else(prep, root):
    before = names(root)
    size = sum(path.stat().st_size for path in root.glob("memory/scan-????????????????.sqlite"))
    dry = prep("clean", "--dry-run", "--json").json
    assert (dry["format"], dry["version"], dry["dry_run"], dry["folder"]) == ("latentry/clean", 1, True, str(root))
    assert dry["removed"]["scan"] == {"files": 2, "bytes": size}
    assert {kind: one["files"] for kind, one in dry["removed"].items()} == {"scan": 2, "tars": 1, "earlier": 2}
    assert dry["bytes"] == sum(one["bytes"] for one in dry["removed"].values())
    shown = prep("clean", "--dry-run").out
    assert "would remove results of scans: 2 files, " in shown and "would be freed" in shown
    assert names(root) == before
    done = prep("clean")
    assert done.code == 0 and "removed listings of tars: 1 file, " in done.out
    assert "no picture, cache or manifest is touched" in done.out
    assert names(root) == MINE
    assert prep("clean").out == f"nothing is remembered in {root}\n"


def test_what_earlier_versions_kept_of_stores_goes(prep, root, monkeypatch):
    """And no copy."""
    for name in ("work/s3/bucket/cache/latentry.json", "headers/s3/bucket/cache/shards/ab/x/zarr.json",
                 "whole/s3/bucket/cache/latentry.json"):
        path = root / "remote" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 10)
    (root / "remote").chmod(0o700)
    assert prep("clean", "--dry-run", "--json").json["removed"]["earlier"]["files"] == 4
    assert (root / "remote/work").is_dir()
    done = prep("clean", "--json").json
    assert done["removed"]["earlier"]["files"] == 4
    assert [path.name for path in (root / "remote").iterdir()] == ["whole"]
    assert (root / "remote/whole/s3/bucket/cache/latentry.json").is_file()


def test_after_it_the_next_run_reads_again(prep, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))
    monkeypatch.setattr(memo, "REST_NS", 0)
    before = {path: path.read_bytes() for path in photos.iterdir()}
    first = prep("scan", photos, "--json", "--jobs", 1)
    assert prep("clean").code == 0 and list(memory_folder().iterdir()) == []
    assert prep("scan", photos, "--json", "--jobs", 1).out == first.out
    assert {path: path.read_bytes() for path in photos.iterdir()} == before
    assert len(list(memory_folder().iterdir())) == 1


def test_nothing_is_there_yet(prep, tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))
    assert prep("clean").out == f"nothing is remembered in {tmp_path / 'caches'}\n"
    assert not (tmp_path / "caches").exists()


def test_a_folder_that_others_can_write_to_is_named(prep, root):
    memory_folder().chmod(0o777)
    result = prep("clean")
    assert result.code == 5
    assert "is not used, so nothing is remembered: others can write to it (mode 0777)" in result.err
    assert "hint: check its contents, then remove it" in result.err


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
def test_a_folder_of_another_user_is_named(prep, root, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    result = prep("clean")
    assert result.code == 5 and f"it belongs to user {mine}, not to user {mine + 1}" in result.err


def test_earlier_files_where_others_can_write_are_left_alone(prep, root):
    root.chmod(0o777)
    assert "earlier" not in prep("clean", "--json").json["removed"]
    assert (root / "scan.sqlite").exists()


def test_what_cannot_be_removed_is_named(prep, root, monkeypatch):
    def refuse(path, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    result = prep("clean")
    assert result.code == 5 and "cannot be removed (Permission denied), nor can 4 others" in result.err


def test_without_a_home(prep, monkeypatch):
    monkeypatch.setattr("prep.maintenance.clean.user_cache", lambda: None)
    result = prep("clean")
    assert result.code == 5 and "there is no home directory" in result.err and "LATENTRY_USER_CACHE" in result.err
