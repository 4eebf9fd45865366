"""Whatever a store or the network does: rows are right or an error is told in a line, and nothing is half-visible."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from remote_rows import rows_of

from prep.cache.remote import documents, quota, shards
from prep.errors import CacheError, ConfigError, PathError
from prep.fs.remote import client, objects, retry
from prep.fs.remote.bucket import Bucket, split_url
from prep.fs.remote.client import open_store
from prep.fs.remote.errors import StoreError
from prep.fs.remote.objects import create_object, read_object, read_range, size_of
from prep.fs.tree import tree_digest

PASSING = ("500", "503", "drop", "truncate")
SECRETS = ("a-key", "a-secret")


def whole(store) -> bool:
    """Whether every copy is as its name says, and nothing is left over."""
    copies = list(store.copies.glob("whole/**/shards/??/*"))
    return all(tree_digest(path) == path.name for path in copies) and not any(store.copies.rglob("tmp/*"))


@pytest.mark.parametrize("fault", [*PASSING, "flip"])
def test_each_request_fails_once(store, small_there, fault, monkeypatch):
    """Of everything: manifest, marker, tables, documents, keys and rows."""
    for module in (shards, documents):
        monkeypatch.setattr(module, "TRIES", 9)
    good = rows_of(small_there / "manifest.json")
    store.proxy.rule = lambda method, path, before: fault if before == 0 else ""
    assert rows_of(Bucket.parse(f"{store.url}/manifest.json")) == good
    assert sum(one == fault for _, _, one in store.proxy.asked) >= len(store.keys(small_there, "shards/"))
    assert whole(store)


@pytest.mark.parametrize("fault", [
    "503", "truncate", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("500", "drop"))])
def test_headers_and_verify_with_every_third_request_failing(store, small_there, prep, fault):
    count = iter(range(10**6))
    store.proxy.rule = lambda method, path, before: fault if next(count) % 3 == 0 else ""
    url = f"{store.url}/manifest.json"
    for words in (("inspect", url, "--sample", "a.png"), ("verify", url, "--quick"), ("verify", url)):
        told = prep(*words)
        assert told.code == 0, told.err


TOLD = {"500": "the store answered 500 Internal Server Error (InternalError)",
        "503": "the store answered 503 Service Unavailable (SlowDown)",
        "drop": "the connection broke", "truncate": "the connection broke"}


@pytest.mark.parametrize("fault", TOLD)
def test_a_store_that_stays_away_is_told_in_one_line(store, small_there, train, fault, monkeypatch):
    monkeypatch.setenv(retry.PATIENCE, "0.1")
    store.proxy.rule = lambda method, path, before: fault
    told = train("check", f"{store.url}/manifest.json")
    error, hint = told.err.splitlines()
    assert told.code == 7
    assert error.startswith(f"error: {store.url}/manifest.json: {TOLD[fault]}; given up after 0 seconds and ")
    assert hint.startswith("hint: check the network and the store") and "LATENTRY_REMOTE_PATIENCE=SECONDS" in hint
    assert not any(secret in told.err for secret in SECRETS)


def test_a_patience_that_is_no_number_is_told_at_once(store, small_there, prep, monkeypatch):
    """Not when the store first fails, hours later."""
    monkeypatch.setenv(retry.PATIENCE, "5m")
    told = prep("inspect", f"{store.url}/manifest.json")
    assert told.code == 3 and "LATENTRY_REMOTE_PATIENCE is '5m', expected a number of seconds" in told.err


def test_no_server_at_all(store, small_there, prep, monkeypatch):
    monkeypatch.setenv(retry.PATIENCE, "0.1")
    store.proxy.close()
    open_store.cache_clear()
    told = prep("inspect", f"{store.url}/manifest.json")
    assert told.code == 7 and "manifest.json: no connection; given up after" in told.err


def test_waiting_is_announced_and_ends_when_the_store_is_back(store, small_there, monkeypatch, caplog):
    monkeypatch.setattr(retry, "QUIET", 0.05)
    begun = time.monotonic()
    store.proxy.rule = lambda method, path, before: "503" if time.monotonic() < begun + 0.5 else ""
    with caplog.at_level(logging.WARNING, "latentry.remote"):
        assert rows_of(Bucket.parse(f"{store.url}/manifest.json")) == rows_of(small_there / "manifest.json")
    (notice,) = caplog.messages
    assert notice.startswith(f"waiting for {store.url}/manifest.json: the store answered 503") and "asked " in notice


def test_a_notice_is_a_line_on_stderr(store, small_there, prep, monkeypatch):
    """Without any setting of logging."""
    monkeypatch.setattr(retry, "QUIET", 0.0)
    store.proxy.rule = lambda method, path, before: "503" if before == 0 and path.endswith("manifest.json") else ""
    program = ("import prep.fs.remote.retry as r, sys; r.QUIET = 0.0; from prep.cli.main import main; "
               "sys.argv[:1] = ['prep']; main()")
    done = subprocess.run([sys.executable, "-c", program, "inspect", f"{store.url}/manifest.json"],
                          capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines() == [f"waiting for {store.url}/manifest.json: the store answered 503 Service "
                                        "Unavailable (SlowDown); asked 1 time in 0 seconds"]


def test_credentials_that_expire_are_read_again_and_told(store, small_there, prep):
    """Once is forgiven: they may have been renewed. Twice is told, with the way out and without a secret."""
    store.proxy.rule = lambda method, path, before: "403" if before == 0 and "tables" in path else ""
    url = f"{store.url}/manifest.json"
    assert prep("inspect", url).code == 0
    store.proxy.rule = lambda method, path, before: "403" if "/shards/" in path else ""
    told = prep("verify", url)
    assert told.code == 7, told.err
    assert "the store answered 403 Forbidden (ExpiredToken)\n" in told.err
    assert "hint: check the credentials in the environment (AWS_ACCESS_KEY_ID, " in told.err
    assert not any(secret in told.err for secret in SECRETS) and len(told.err.splitlines()) == 2
    assert not any(secret.encode() in path.read_bytes() for path in store.copies.rglob("*") if path.is_file()
                   for secret in SECRETS)


def test_a_wrong_clock_is_told_at_once_and_not_as_wrong_credentials(store, small_there, prep):
    store.proxy.rule = lambda method, path, before: "403 clock"
    url = f"{store.url}/manifest.json"
    told = prep("inspect", url)
    assert told.code == 7 and len(store.proxy.asked) == 1
    assert told.err == (f"error: {url}: the store refuses requests of this computer, whose clock differs too much from "
                        "the store's\nhint: set the clock (timedatectl set-ntp true on Linux), then run the same "
                        "command again\n")
    with pytest.raises(CacheError, match="whose clock differs too much"):
        create_object(f"{store.url}/x", b"x")


@pytest.mark.parametrize("act", [
    lambda url: create_object(url, b"x"), lambda url: objects.replace_object(url, b"x"), objects.size_of,
    objects.list_objects, objects.delete_object, lambda url: objects.copy_object(url, f"{url}2"),
    lambda url: list(objects.stream(url, 5)), lambda url: objects.read_object(url, 9)])
def test_unknown_keys_are_told_as_credentials_whatever_is_asked(store, act):
    """Also where no code can be told: an answer to HEAD has no body."""
    store.proxy.rule = lambda method, path, before: "403 key"
    with pytest.raises(CacheError, match=r"the store answered 403 Forbidden( \(InvalidAccessKeyId\))?$") as caught:
        act(f"{store.url}/x")
    assert caught.value.hint.startswith("check the credentials in the environment (AWS_ACCESS_KEY_ID, ")
    assert "and this computer's clock" in caught.value.hint


def test_an_object_too_large_for_one_request_is_copied_in_parts(store, monkeypatch):
    monkeypatch.setattr(objects, "COPIED_BY_STORE", 1000)
    monkeypatch.setattr(objects, "UPLOAD_PART", 5 << 20)  # the least that S3 takes
    data = np.random.default_rng(0).bytes(11 << 20)
    objects.replace_object(f"{store.url}/from", data)
    store.proxy.rule = lambda method, path, before: (
        "lose" if method == "POST" and "uploadId" in path and not before else "")
    objects.copy_object(f"{store.url}/from", f"{store.url}/to")
    assert objects.read_object(f"{store.url}/to", 20 << 20) == data
    assert store.proxy.count("PUT", "partNumber=3") == 1, "three parts"
    objects.replace_object(f"{store.url}/small", data[:1000])
    objects.copy_object(f"{store.url}/small", f"{store.url}/to")
    assert objects.read_object(f"{store.url}/to", 2000) == data[:1000]


def test_a_copy_in_parts_that_breaks_off_publishes_nothing(store, monkeypatch):
    monkeypatch.setattr(objects, "COPIED_BY_STORE", 1000)
    objects.replace_object(f"{store.url}/from", bytes(2000))

    def broken(url, end, **_):
        yield bytes(1500)
        raise StoreError(f"{url}: gone")

    monkeypatch.setattr(objects, "stream", broken)
    with pytest.raises(StoreError, match="from: gone"):
        objects.copy_object(f"{store.url}/from", f"{store.url}/to")
    gc.collect()
    assert objects.list_objects(store.url).keys() == {"from"}


def test_a_file_has_no_more_parts_than_a_store_takes():
    assert objects._part_of(1) == objects._part_of(objects.MOST_PARTS * objects.UPLOAD_PART) == objects.UPLOAD_PART
    size = 500_000_000_000
    assert -(-size // objects._part_of(size)) <= objects.MOST_PARTS


def test_other_refusals_are_not_repeated(store, small_there, prep):
    store.proxy.rule = lambda method, path, before: "400"
    told = prep("inspect", f"{store.url}/manifest.json")
    assert told.code == 7 and "the store answered 400 Bad Request (BadRequest)" in told.err
    assert "hint: check bucket, region and endpoint" in told.err and len(store.proxy.asked) == 1


def test_what_is_not_there(store, small_there, prep):
    told = prep("inspect", f"{store.url}/other.json")
    assert told.code == 4 and f"cannot read manifest {store.url}/other.json: there is no such object" in told.err
    told = prep("inspect", "s3://no-such-bucket/manifest.json")
    assert told.code == 4 and "manifest.json: there is no such bucket" in told.err
    store.server.put(f"{store.prefix}/cache/latentry.json", b"{}")
    told = prep("inspect", f"{store.url}/manifest.json")
    assert told.code == 7 and "latentry.json is damaged: its seal does not match" in told.err
    store.server.delete(f"{store.prefix}/cache/latentry.json")
    told = prep("inspect", f"{store.url}/manifest.json")
    assert told.code == 7 and f"error: there is no cache in {store.url}/cache: it has no latentry.json" in told.err


def test_tables_and_shards_that_do_not_match_their_names(store, small_there, prep):
    url = f"{store.url}/manifest.json"
    name = store.keys(small_there, "mask/c.0")[0]
    data = store.server.get(f"{store.prefix}/{name}")
    store.server.put(f"{store.prefix}/{name}", bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CacheError, match=r"is damaged: its bytes do not match its digest \(downloaded 3 times\)"):
        rows_of(Bucket.parse(url))
    assert whole(store)
    key = store.keys(small_there, "mask/zarr.json")[0]
    store.server.put(f"{store.prefix}/{key}", b"{}")
    told = prep("inspect", url, "--sample", "a.png")
    assert told.code == 0 and "unreadable" in told.out
    for table in store.keys(small_there, "tables/"):
        store.server.put(f"{store.prefix}/{table}", b"ARROW1")
    told = prep("inspect", url)
    assert told.code == 0, "copies of tables are as their names say"
    for copy in store.copies.rglob("*.arrow"):
        copy.unlink()
    told = prep("inspect", url)
    said = [f"error: {store.url}/{table} is damaged: its bytes do not match its name" for table in
            store.keys(small_there, "tables/")]
    assert told.code == 7 and told.err.splitlines()[0] in said
    for table in store.keys(small_there, "tables/"):
        store.server.delete(f"{store.prefix}/{table}")
    told = prep("inspect", url)
    said = [f"error: {store.url}/{table} is missing" for table in store.keys(small_there, "tables/")]
    assert told.code == 7 and told.err.splitlines()[0] in said


def test_a_shard_without_a_file(store, small_there):
    name = store.keys(small_there, "mask/c.0")[0]
    store.server.delete(f"{store.prefix}/{name}")
    with pytest.raises(CacheError, match=r"shard .* in s3://.* is missing or incomplete: it has no mask/c"):
        rows_of(Bucket.parse(f"{store.url}/manifest.json"))
    assert whole(store)


def test_a_full_disk_is_told_with_the_options(store, small_there, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), handle.name)

    rows_of(Bucket.parse(f"{store.url}/manifest.json"))
    for copy in store.copies.glob("whole/**/shards"):
        quota.atomic.remove_tree(copy)
    monkeypatch.setattr(shards.atomic, "write", full)
    with pytest.raises(CacheError, match=r"there is no room for .* in .*: the disk is full") as caught:
        rows_of(Bucket.parse(f"{store.url}/manifest.json"))
    assert "LATENTRY_REMOTE_DIR=DIR" in caught.value.hint and "LATENTRY_REMOTE_LIMIT=200GB" in caught.value.hint
    monkeypatch.undo()


def test_a_disk_that_is_full_for_a_moment_loses_the_oldest_copy(store, small_there, monkeypatch):
    url, good = Bucket.parse(f"{store.url}/manifest.json"), rows_of(small_there / "manifest.json")
    rows_of(url)
    (mask,) = store.copies.glob("whole/**/shards/*/*/mask")
    quota.atomic.remove_tree(mask.parent)
    there = len(list(store.copies.glob("whole/**/shards/??/*")))
    write, times = shards.atomic.write, []

    def full(handle, data):
        times.append(1)
        if len(times) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), handle.name)
        write(handle, data)

    monkeypatch.setattr(shards.atomic, "write", full)
    rows = quota._copies()[1]
    assert rows_of(url) == good and times
    assert not rows[0][2].exists() or rows[0][2].stat().st_mtime != rows[0][0], "the oldest was removed"
    assert there


FREE = ("hint: free some space, or name a directory on another disk with LATENTRY_REMOTE_DIR=DIR, or let copies take "
        "less with LATENTRY_REMOTE_LIMIT=20GB, and run the same command again; finished work is kept\n")


@pytest.mark.parametrize(("words", "last"), [
    (("encode", "photos"), "latentry.json"), (("encode", "photos"), "zarr.json"), (("compact",), "latentry.json"),
    (("compact",), "zarr.json"), (("gc",), "latentry.json"), (("gc",), "zarr.json")])
def test_a_disk_of_copies_that_is_full_is_told_with_the_options(store, small_there, photos, tiny_model, prep,
                                                                monkeypatch, words, last):
    """Of whatever writes among the copies: the first file of all, and one of a shard."""
    create, full = quota.atomic.create, list[str]()

    def creating(path, *, mode=None):
        if last in (path.name, "latentry.json") and store.copies in path.parents:
            full.append(str(path))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return create(path, mode=mode)

    monkeypatch.setattr(quota.atomic, "create", creating)
    given = {"encode": ("--cache", f"{store.url}/encoded", "-o", f"{store.url}/m.json", "--model", tiny_model,
                        "--resolution", 96), "compact": (), "gc": ("--keep", f"{store.url}/manifest.json")}[words[0]]
    told = prep(words[0], photos if words[1:] else f"{store.url}/cache", *given, "--quiet")
    monkeypatch.undo()
    assert told.code == 7 and full, told.err
    assert told.err in [f"error: {path}: No space left on device\n{FREE}" for path in full]


READ = """
import sys
sys.path.insert(0, sys.argv[2])
from prep.fs.place import place_of
from remote_rows import rows_of
rows_of(place_of(sys.argv[1]))
"""


def test_a_killed_download_leaves_nothing_half_visible(store, small_there):
    here = Path(__file__)
    for number in (1, 4, 9):
        store.proxy.forget()
        seen = iter(range(10**6))
        store.proxy.rule = lambda method, path, before, seen=seen, number=number: (
            "hang" if "/shards/" in path and next(seen) >= number else "")
        reader = subprocess.Popen([sys.executable, "-c", READ, f"{store.url}/manifest.json",
                                   str(here.parents[1] / "support")])
        assert store.proxy.hung.wait(30)
        reader.send_signal(signal.SIGKILL)
        reader.wait()
        assert all(tree_digest(path) == path.name for path in store.copies.glob("whole/**/shards/??/*"))
    store.proxy.forget()
    assert rows_of(Bucket.parse(f"{store.url}/manifest.json")) == rows_of(small_there / "manifest.json")
    monthly = list(store.copies.rglob("tmp/*"))
    for left in monthly:
        os.utime(left, (0, 0))
    quota._copies()
    assert monthly and not list(store.copies.rglob("tmp/*"))


GIVEN = "s3://bucket/m.json was given with a user, a query or a fragment, expected only bucket and key"


def test_urls_with_secrets_are_refused_without_them(prep, store):
    for url, what in (("s3://user:word@bucket/m.json", GIVEN), ("s3://bucket/m.json?X-Amz-Signature=word", GIVEN),
                      ("s3://user:wo/word@bucket/m.json", GIVEN), ("s3://bucket/m.json#word", GIVEN),
                      ("s3://user:word/m.json", "s3://m.json was given with a user"),
                      ("s3://bucket/../../m.json", "leaves its bucket"), ("s3://", "names no bucket")):
        told = prep("inspect", url)
        assert told.code == 5 and what in told.err and "word" not in told.err, told.err
    with pytest.raises(PathError, match="leaves its bucket"):
        split_url("s3://bucket/a/../../x")


def test_settings_that_are_not_valid(store, prep, monkeypatch):
    monkeypatch.setenv(retry.PATIENCE, "long")
    store.proxy.rule = lambda method, path, before: "503"
    with pytest.raises(ConfigError, match="LATENTRY_REMOTE_PATIENCE is 'long', expected a number of seconds"):
        read_object(f"{store.url}/x", 10)
    monkeypatch.delenv(retry.PATIENCE)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    open_store.cache_clear()
    with pytest.raises(StoreError, match="plain http, which is not allowed without AWS_ALLOW_HTTP=true"):
        read_object(f"{store.url}/x", 10)
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "whatever")
    open_store.cache_clear()
    with pytest.raises(StoreError, match="cannot be opened: the settings of the store are not valid"):
        read_object(f"{store.url}/x", 10)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "user:word@minio:9000")
    open_store.cache_clear()
    with pytest.raises(StoreError, match="cannot be opened: AWS_ENDPOINT_URL is no URL"):
        read_object(f"{store.url}/x", 10)


def test_no_credentials_at_all(store, prep, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(retry.PATIENCE, "0.1")
    told = prep("inspect", f"{store.url}/manifest.json")
    assert told.code == 7, told.err
    assert "the environment has no credentials, and this machine has no role that gives some; given up" in told.err
    assert "hint: check the credentials in the environment (AWS_ACCESS_KEY_ID, " in told.err


def test_a_place_where_no_copies_can_be(store, small_there, prep, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("LATENTRY_REMOTE_DIR", str(tmp_path / "file" / "copies"))
    told = prep("inspect", f"{store.url}/manifest.json")
    assert told.code == 5 and "for local copies of what is in an object store, cannot be made: Not a dir" in told.err
    assert "hint: name another directory: export LATENTRY_REMOTE_DIR=DIR" in told.err


def test_without_the_library(prep, store, monkeypatch):
    monkeypatch.setattr(client, "find_spec", lambda name: None)
    open_store.cache_clear()
    told = prep("inspect", f"{store.url}/manifest.json")
    assert told.code == 3 and "is in an object store, which needs the library obstore" in told.err
    assert "hint: pip install 'latentry[remote]'" in told.err


def test_a_user_without_a_home(prep, store, monkeypatch):
    monkeypatch.delenv("LATENTRY_REMOTE_DIR")
    monkeypatch.setattr("prep.fs.user_cache.user_cache", lambda: None)
    told = prep("inspect", f"{store.url}/manifest.json")
    assert told.code == 5 and "there is no directory for local copies of what is in an object store" in told.err
    assert "export LATENTRY_REMOTE_DIR=DIR" in told.err


def test_ranges_go_on_where_a_connection_broke(store):
    data = os.urandom(12 << 20)
    store.server.put(f"{store.prefix}/big", data)
    store.proxy.rule = lambda method, path, before: "truncate" if before < 3 else ""
    assert read_range(f"{store.url}/big", 0, len(data)) == data
    assert store.proxy.sent < 1.4 * len(data)
    assert read_range(f"{store.url}/big", 1000, 2000) == data[1000:2000]
    assert read_range(f"{store.url}/big", len(data) - 10, len(data) + 10) == data[-10:]
    assert size_of(f"{store.url}/big") == len(data)
    with pytest.raises(OSError, match="expected at most 10"):
        read_object(f"{store.url}/big", 10)


def test_a_creation_whose_answer_is_lost_is_recognized(store):
    url = f"{store.url}/commit"
    store.proxy.rule = lambda method, path, before: "lose" if method == "PUT" and before == 0 else ""
    assert create_object(url, b"mine")
    assert store.server.get(f"{store.prefix}/commit") == b"mine"
    assert not create_object(url, b"other") and not create_object(url, b"mine")
    store.proxy.forget()
    store.server.put(f"{store.prefix}/taken", b"theirs")
    store.proxy.rule = lambda method, path, before: "503" if method == "PUT" and before == 0 else ""
    assert not create_object(f"{store.url}/taken", b"mine")
    assert store.server.get(f"{store.prefix}/taken") == b"theirs"


@pytest.mark.parametrize("fault", ["409", "409 aborted"])
def test_writes_that_meet_others_of_the_same_object_are_repeated(store, fault):
    """S3 does not say that there is an object: the other write may not have ended, or fail."""
    store.proxy.rule = lambda method, path, before: fault if method == "PUT" and before == 0 else ""
    assert create_object(f"{store.url}/commit", b"mine")
    assert objects.create_checked(f"{store.url}/marker", b"mine", 9) == b"mine"
    objects.replace_object(f"{store.url}/plan", b"mine")
    assert [store.server.get(f"{store.prefix}/{name}") for name in ("commit", "marker", "plan")] == [b"mine"] * 3
    store.server.put(f"{store.prefix}/taken", b"mine")
    assert not create_object(f"{store.url}/taken", b"mine"), "the attempt that met another wrote nothing"


def test_a_store_where_writes_always_meet_others_is_told(store, monkeypatch):
    monkeypatch.setenv(retry.PATIENCE, "0")
    store.proxy.rule = lambda method, path, before: "409" if method == "PUT" else ""
    with pytest.raises(StoreError, match=r"the store answered 409 Conflict \(ConditionalRequestConflict\); given up"):
        create_object(f"{store.url}/commit", b"mine")
