"""Copies lie where their URLs say, wherever the directory of copies is."""

from __future__ import annotations

import os

import pytest

from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import (
    copied,
    copy_of,
    mirror,
    original_of,
    run_root,
)
from prep.runs.document import place_in

URL = "s3://bucket/a/manifest.json"
AT = Bucket.parse(URL)


@pytest.mark.parametrize("named", ["copies", "../copies", "copies/../other", "{here}/../copies", "./copies//x/.."])
def test_the_directory_of_copies_may_be_named_in_any_way(tmp_path, monkeypatch, named):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("LATENTRY_REMOTE_DIR", named.format(here=tmp_path / "here"))
    copy = copy_of(Bucket.parse(URL))
    assert copy.is_absolute() and ".." not in mirror().parts
    assert copied(copy) == AT
    assert copied(copy.parent / ".." / "a" / "manifest.json") == AT
    assert run_root(AT).is_relative_to(mirror()) and copied(run_root(AT)) is None


def test_a_directory_of_the_users_cache_may_be_named_in_any_way(tmp_path, monkeypatch):
    monkeypatch.delenv("LATENTRY_REMOTE_DIR", raising=False)
    monkeypatch.setattr("prep.fs.user_cache.user_cache", lambda: tmp_path / "here" / ".." / "cache")
    assert copied(copy_of(AT)) == AT


def test_the_path_of_a_copy_means_what_it_is_a_copy_of(tmp_path, monkeypatch):
    """As run.json of earlier versions names a manifest in a store, relative to the run."""
    monkeypatch.setenv("LATENTRY_REMOTE_DIR", str(tmp_path / "copies"))
    place = Bucket.parse(URL)
    named = os.path.relpath(copy_of(place), tmp_path / "runs" / "cat")
    assert original_of(tmp_path / "runs" / "cat" / named) == place == place_in(tmp_path / "runs" / "cat", named)
    assert place_in(tmp_path / "runs", URL) == place and original_of(tmp_path / "m.json") == tmp_path / "m.json"
    assert place_in(tmp_path / "runs", "../m.json") == tmp_path / "runs" / ".." / "m.json"
