"""Room for copies: what is in use stays, and what goes all the same is fetched again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from prep.cache.publish import retire_shard
from prep.cache.reader import OPENINGS, Reader
from prep.cache.remote import quota
from prep.errors import CacheError
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.errors import Stopped
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest


@pytest.fixture
def audit(store, small_there):
    return open_manifest(read_manifest(Bucket.parse(f"{store.url}/manifest.json")))


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
    reader, out = Reader(audit.cache), memoryview(bytearray(64))
    removed_while_opened(reader, audit, 2, monkeypatch)
    reader.read_into(out, shard, "mask", 0)
    reader.close()
    assert any(out) and store.proxy.count("GET", "/mask/c.0") == 3


def test_a_copy_that_is_removed_again_and_again_is_told(audit, monkeypatch):
    shard = next(one["digest"] for one in audit.shards if one["field"] == "mask")
    reader = Reader(audit.cache)
    removed_while_opened(reader, audit, OPENINGS, monkeypatch)
    with pytest.raises(CacheError, match=f"^the copy of shard {shard} was removed 10 times before it was ") as caught:
        reader.array_info(shard, "mask")
    assert caught.value.hint.startswith("allow copies more room with LATENTRY_REMOTE_LIMIT=200GB, or free some space")
    assert reader.array_info(shard, "mask")[1] == 1


def test_what_was_opened_since_the_copies_were_measured_stays(audit):
    reader = Reader(audit.cache)
    for shard in audit.shards:
        for array in shard["shapes"]:
            reader.array_info(shard["digest"], array)
    for number, (_, _, path) in enumerate(quota._copies()[1]):
        os.utime(path, (number, number))
    copies = quota._copies()[1]
    assert reader.fetcher.touch(copies[0][2].name)
    assert quota._remove_oldest(copies, 1) == copies[1][1]
    assert [path.is_dir() for _, _, path in copies] == [True, False, *[True] * (len(copies) - 2)]


def test_a_download_counts_in_full_until_it_ends(store, monkeypatch):
    """Also after the room was measured again, and for other processes, which have a `Quota` of their own."""
    monkeypatch.setenv(quota.LIMIT, "1000")
    monkeypatch.setattr(quota, "RESCAN", 0.0)
    first, second, ended = quota.Quota(), quota.Quota(), threading.Event()
    ended.set()
    with first.reserved(400, ended), second.reserved(400, ended):
        for other in (first, second):
            with pytest.raises(Stopped), other.reserved(400, ended):
                pass
        with second.reserved(200, ended):
            pass
    with second.reserved(1000, ended):
        pass
    with pytest.raises(CacheError, match="there is no room for 1001 bytes"), first.reserved(1001, ended):
        pass
    assert sorted(path.name for path in (store.copies / "coming").iterdir()) == ["lock", "room"]


def test_it_waits_for_room_that_a_download_takes(store, monkeypatch):
    monkeypatch.setenv(quota.LIMIT, "1000")
    monkeypatch.setattr(quota, "PAUSE", 0.001)
    waiting, begun, order = threading.Event(), quota.Quota._begun, []

    def noted(self, size):
        found = begun(self, size)
        if found is None:
            waiting.set()
        return found

    def other():
        with quota.Quota().reserved(700, threading.Event()):
            order.append("second")

    monkeypatch.setattr(quota.Quota, "_begun", noted)
    thread = threading.Thread(target=other)
    with quota.Quota().reserved(600, threading.Event()):
        thread.start()
        assert waiting.wait(30)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


HOLD = """
import sys, threading
from prep.cache.remote.quota import QUOTA
with QUOTA.reserved(900, threading.Event()):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_download_of_a_killed_process_does_not_count(store, monkeypatch):
    monkeypatch.setenv(quota.LIMIT, "1000")
    ended = threading.Event()
    ended.set()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(Stopped), quota.Quota().reserved(900, ended):
            pass
        other.kill()
    with quota.Quota().reserved(900, ended):
        pass


def test_what_is_measured_serves_other_processes_for_a_while(store, monkeypatch):
    monkeypatch.setenv(quota.LIMIT, "1000")
    looks, copies = [], quota._copies
    monkeypatch.setattr(quota, "_copies", lambda: looks.append(1) or copies())
    for size in (100, 200, 300):
        quota.Quota().make(size)
    assert len(looks) == 1
    quota.Quota().make(500)
    assert len(looks) == 2, "too little was left"
    monkeypatch.setenv(quota.LIMIT, "2000")
    quota.Quota().make(100)
    assert len(looks) == 3, "another limit"


def test_what_earlier_versions_kept_goes_unless_one_of_them_may_be_running(store, monkeypatch):
    monkeypatch.setattr(quota, "RESCAN", 0.0)
    old, used = (store.copies / kind / "s3" / "bucket" / "cache" for kind in ("headers", "work"))
    for root in (old, used):
        (root / "shards").mkdir(parents=True)
        (root / quota.MARKER).write_bytes(b"{}")
    for path in (old / "shards", old / quota.MARKER, old):
        os.utime(path, (0, 0))
    quota.Quota().make(1)
    assert not old.exists() and (used / "shards").is_dir()


def test_a_directory_that_another_process_removes_is_passed_over(audit, monkeypatch):
    rows = Reader(audit.cache)
    rows.array_info(audit.shards[0]["digest"], next(iter(audit.shards[0]["shapes"])))
    rows.close()
    gone, walk = audit.cache.root.parent / "gone", os.walk
    gone.mkdir()

    def walked(top):
        for found in walk(top):
            if found[0] == str(gone):
                gone.rmdir()
            yield found

    monkeypatch.setattr(quota.os, "walk", walked)
    assert quota._copies()[0] > 0 and not gone.exists()
