"""Room for copies: what is in use stays, and what goes all the same is fetched again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prep.cache.reader import OPENINGS, Reader
from prep.cache.remote import room
from prep.cache.store import retire_shard
from prep.errors import CacheError
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest


@pytest.fixture
def audit(store, small_there):
    return open_manifest(read_manifest(Path(f"{store.url}/manifest.json")))


def removed_while_opened(reader, audit, times, monkeypatch):
    """Another process removes a copy, so many times, just before the reader opens it."""
    ensure, left = reader.fetcher.ensure, [None] * times

    def racing(digest, **options):
        found = ensure(digest, **options)
        if left:
            left.pop()
            retire_shard(audit.cache, digest)
        return found

    monkeypatch.setattr(reader.fetcher, "ensure", racing)


def test_a_copy_that_another_process_removes_before_it_is_open_is_fetched_again(store, audit, monkeypatch):
    shard = next(one["digest"] for one in audit.shards if one["field"] == "mask")
    reader, out = Reader(audit.cache.root), memoryview(bytearray(64))
    removed_while_opened(reader, audit, 2, monkeypatch)
    reader.read_into(out, shard, "mask", 0)
    reader.close()
    assert any(out) and store.proxy.count("GET", "/mask/c.0") == 3


def test_a_copy_that_is_removed_again_and_again_is_told(audit, monkeypatch):
    shard = next(one["digest"] for one in audit.shards if one["field"] == "mask")
    reader = Reader(audit.cache.root)
    removed_while_opened(reader, audit, OPENINGS, monkeypatch)
    with pytest.raises(CacheError, match=f"^the copy of shard {shard} was removed 10 times before it was ") as caught:
        reader.array_info(shard, "mask")
    assert caught.value.hint.startswith("allow copies more room with LATENTRY_REMOTE_LIMIT=200GB, or free some space")
    assert reader.array_info(shard, "mask")[1] == 1


def test_what_was_opened_since_the_copies_were_measured_stays(audit):
    reader = Reader(audit.cache.root)
    for shard in audit.shards:
        for array in shard["shapes"]:
            reader.array_info(shard["digest"], array)
    for number, (_, _, path) in enumerate(room._copies()[1]):
        os.utime(path, (number, number))
    copies = room._copies()[1]
    assert reader.fetcher.touch(copies[0][2].name)
    assert room._remove_oldest(copies, 1) == copies[1][1]
    assert [path.is_dir() for _, _, path in copies] == [True, False, *[True] * (len(copies) - 2)]
