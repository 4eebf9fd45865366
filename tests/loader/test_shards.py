"""Shards are compared with the manifest, and a second time only where their files changed."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from prep.errors import CacheError
from prep.fs import stamps
from prep.loader import shards
from prep.loader.index import open_index
from prep.loader.shards import check_shards


@pytest.fixture
def index(make):
    """An index whose shards have been at rest for long."""
    found = open_index(make().manifest)
    with mock.patch.object(stamps.time, "time_ns", lambda: 1 << 62):
        yield found


def data_file(index, field):
    shard = next(shard for shard in index.shards if shard.field == field)
    return next(index.cache.shard(shard.digest).glob("[!k]*/c.0*"))


def test_a_second_check_opens_only_what_changed(index):
    known = check_shards(index)
    assert set(known) == {shard.digest for shard in index.shards}
    with mock.patch.object(shards.Reader, "open_all", autospec=True, return_value=[]) as opened:
        check_shards(index, known)
        assert list(opened.call_args.args[1]) == []
    path = data_file(index, "latent")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")  # of equal size
    with pytest.raises(CacheError, match="damaged shard index"):
        check_shards(index, known)


@pytest.mark.parametrize("what", ["size", "gone"])
def test_a_second_check_sees_what_the_first_would(index, what):
    known = check_shards(index)
    path = data_file(index, "text")
    if what == "size":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(CacheError, match=f"shard {path.parents[1].name} .* has "):
        check_shards(index, known)


def test_without_stamps_all_are_checked_again(index, monkeypatch):
    """On Windows, and for files that changed a moment ago, nothing is known of a shard."""
    monkeypatch.setattr(shards, "ctime_is_reliable", lambda: False)
    known = check_shards(index)
    assert known == {}
    path = data_file(index, "latent")
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CacheError, match="damaged shard index"):
        check_shards(index, known)


def test_files_that_changed_a_moment_ago_are_not_remembered(make):
    assert check_shards(open_index(make().manifest)) == {}


@pytest.mark.parametrize(("what", "message"), [
    ("file", "has [0-9]+ bytes, expected"), ("link", "is a link"), ("folder", "nested deeper"),
])
@pytest.mark.parametrize("second", [False, True])
def test_what_does_not_belong_in_a_shard(index, what, message, second):
    known = check_shards(index)
    folder = data_file(index, "latent").parent
    if what == "file":
        (folder / "added").write_bytes(b"1")
    elif what == "link":
        (folder / "added").symlink_to(folder / "zarr.json")
    else:
        (folder / "added").mkdir()
    with pytest.raises(CacheError, match=message):
        check_shards(index, known if second else None)
