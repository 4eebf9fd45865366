"""Copies lie where their URLs say, wherever the directory of copies is."""

from __future__ import annotations

from pathlib import Path

import pytest

from prep.fs.mirror import headers_root, local_path, mirror, run_root, run_url, shown, url_of, work_root

URL = "s3://bucket/a/manifest.json"


@pytest.mark.parametrize("named", ["copies", "../copies", "copies/../other", "{here}/../copies", "./copies//x/.."])
def test_the_directory_of_copies_may_be_named_in_any_way(tmp_path, monkeypatch, named):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("LATENTRY_REMOTE_DIR", named.format(here=tmp_path / "here"))
    copy = local_path(Path(URL))
    assert copy.is_absolute() and ".." not in mirror().parts
    assert url_of(copy) == shown(copy) == URL
    assert url_of(copy.parent / ".." / "a" / "manifest.json") == URL
    assert run_url(run_root(URL)) == URL
    for root in (headers_root(copy), work_root(URL)):
        assert root.is_relative_to(mirror()) and url_of(root) is None


def test_a_directory_of_the_users_cache_may_be_named_in_any_way(tmp_path, monkeypatch):
    monkeypatch.delenv("LATENTRY_REMOTE_DIR", raising=False)
    monkeypatch.setattr("prep.fs.user_cache.user_cache", lambda: tmp_path / "here" / ".." / "cache")
    assert url_of(local_path(Path(URL))) == URL
