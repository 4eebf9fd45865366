"""What is in an object store reads as it does from a disk, and each shard comes once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from remote_rows import rows_of

from prep.cache.reader import Reader
from prep.cache.records import RowRef
from prep.cache.remote.headers import cost_of, ensure_headers
from prep.cache.shard_format import data_bytes, row_stride
from prep.errors import CacheError
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import copied, copy_of
from prep.fs.remote.retry import PATIENCE
from prep.loader.index import open_index
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest


def test_a_manifest_is_described_from_range_reads(prep, store, small_there):
    """No row is read, and nothing is listed."""
    here = prep("inspect", small_there / "manifest.json", "--json")
    there = prep("inspect", f"{store.url}/manifest.json", "--json")
    assert there.code == 0, there.err
    assert there.json == here.json
    assert store.proxy.count(part="/shards/") == 0 and store.proxy.count(part="list-type") == 0
    for options in (("--sample", "a.png"), ("--sample", "sub/b.png")):
        assert prep("inspect", f"{store.url}/manifest.json", *options, "--json").json == prep(
            "inspect", small_there / "manifest.json", *options, "--json").json
    assert not [path for method, path, _ in store.proxy.asked if method == "GET" and "list-type" in path]
    assert not list(store.copies.glob("whole/*/*/*/cache/shards")), "no whole shard was needed"


def test_a_header_costs_what_is_told_beforehand(store, small_there):
    """As `train check --store-latency` counts it."""
    manifest = read_manifest(Bucket.parse(f"{store.url}/manifest.json"))
    index = open_index(manifest)
    store.proxy.forget()
    ensure_headers(index.cache, [shard.digest for shard in index.shards])
    told = [cost_of(shard.remote) for shard in index.shards]
    assert store.proxy.count(part="shards") == sum(requests for requests, _ in told) > len(told)
    for shard, (_, size) in zip(index.shards, told, strict=True):
        indexes = sum(data_bytes(spec, shard.rows) - shard.rows * row_stride(spec) for spec in shard.remote.arrays)
        files = [path for path in Path(index.cache.header_path(shard.digest)).rglob("*") if path.is_file()]
        assert size == sum(path.stat().st_size for path in files) + indexes


@pytest.mark.parametrize("options", [(), ("--quick",)], ids=["every byte", "quick"])
def test_verify_reads_what_is_stored_now(prep, store, small_there, options):
    """Copies do not answer for the store: neither whole ones nor headers."""
    url = f"{store.url}/manifest.json"
    good = prep("verify", url, "--json", *options)
    assert (good.code, good.json["ok"]) == (0, True), good.err
    name = store.keys(small_there, "latent/c.0")[0]
    data = store.server.get(f"{store.prefix}/{name}")
    store.server.put(f"{store.prefix}/{name}", data[:-1] + bytes([data[-1] ^ 1]))  # of the shard index
    bad = prep("verify", url, "--json", *options)
    assert (bad.code, bad.json["ok"]) == (7, False)
    assert [one["what"] for one in bad.json["damaged"]] == [f"{name.split('/', 4)[4]} has a damaged shard index"]
    assert any("prep push MANIFEST" in note for note in bad.json["notes"])
    told = prep("verify", url, *options).out
    assert "run that prep encode again with --recheck" in told and "to repair, run prep encode again" not in told
    store.server.delete(f"{store.prefix}/{name}")
    bad = prep("verify", url, "--json", *options)
    assert bad.code == 7 and len(bad.json["damaged"]) == 1
    assert not list(store.copies.rglob("damaged/*.json")) and not list(store.copies.rglob("tmp/*"))


def test_a_shard_that_is_not_there_is_named(prep, store, small_there):
    for name in store.keys(small_there, "shards/"):
        if "latent" in name or name.count("/") == 4:
            store.server.delete(f"{store.prefix}/{name}")
    found = prep("verify", f"{store.url}/manifest.json", "--json", "--quick").json
    assert not found["ok"] and {one["field"] for one in found["damaged"]} == {"latent", "mask", "text"}


def test_rows_are_those_of_the_disk_and_come_once(store, small_there):
    url = Bucket.parse(f"{store.url}/manifest.json")
    assert rows_of(url) == rows_of(small_there / "manifest.json")
    data = [path for _, path, _ in store.proxy.asked if "/c.0" in path]
    assert len(data) == len(set(data)) == len(store.keys(small_there, "/c.0"))
    store.proxy.forget()
    assert rows_of(url) == rows_of(small_there / "manifest.json")
    assert [path.rsplit("/", 1)[1] for _, path, _ in store.proxy.asked] == ["manifest.json"]


def read(url, environment, together):
    """What a rank does first."""
    os.environ.update(environment)
    together.wait()
    read_manifest(Bucket.parse(url))


@pytest.mark.slow
def test_processes_of_one_computer_download_each_table_once(store, small_there):
    processes = multiprocessing.get_context("spawn")
    together = processes.Barrier(4, timeout=60)
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "LATENTRY_"))}
    ranks = [processes.Process(target=read, args=(f"{store.url}/manifest.json", environment, together))
             for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert store.proxy.count("GET", "/tables/") == len(store.keys(small_there, "tables/"))


def test_headers_that_are_not_all_read_leave_nothing(store, small_there, monkeypatch):
    """What a killed process left goes after a day."""
    audit = open_manifest(read_manifest(Bucket.parse(f"{store.url}/manifest.json")))
    digests, left = [shard["digest"] for shard in audit.shards], audit.cache.root / "tmp"
    old, new = (left / name for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    monkeypatch.setenv(PATIENCE, "0")
    store.proxy.rule = lambda method, path, before: "503" if "/key/c" in path else ""
    with pytest.raises(CacheError, match="the store answered 503"):
        ensure_headers(audit.cache, digests)
    assert list(left.iterdir()) == [new]
    store.proxy.forget()
    ensure_headers(audit.cache, digests)
    assert set(audit.cache.shards("headers")) == set(digests) and not list(audit.cache.shards())
    assert list(left.iterdir()) == [new]


def test_a_copy_that_was_damaged_is_fetched_again_within_the_run(store, small_there):
    url = Bucket.parse(f"{store.url}/manifest.json")
    good = rows_of(url)
    (copy,) = store.copies.glob("whole/*/*/*/cache/shards/*/*/mask/c.0*")
    data = bytearray(copy.read_bytes())
    data[3] ^= 1
    copy.chmod(0o644)
    copy.write_bytes(data)
    store.proxy.forget()
    assert rows_of(url) == good
    assert store.proxy.count("GET", "/mask/c.0") == 1
    assert not list(store.copies.rglob("damaged/*.json"))


def test_a_copy_that_is_removed_is_fetched_again(store, small_there):
    url = Bucket.parse(f"{store.url}/manifest.json")
    audit = open_manifest(read_manifest(url))
    (shard,) = [one for one in audit.shards if one["field"] == "mask"]
    reader, out = Reader(audit.cache, open_arrays=1), memoryview(bytearray(64))
    reader.read_into(out, shard["digest"], "mask", 0)
    shutil.rmtree(audit.cache.root / "shards")
    other = next(one for one in audit.shards if one["field"] == "latent")
    reader.array_info(other["digest"], "latent")  # closes the mask's file
    again = memoryview(bytearray(64))
    reader.read_into(again, shard["digest"], "mask", 0)
    assert again == out
    reader.close()


def test_paths_and_urls_are_one(store):
    url = f"{store.url}/a/manifest.json"
    copy = copy_of(Bucket.parse(url))
    assert str(copied(copy)) == url
    assert str(copied(copy.parent / ".." / "b")) == f"{store.url}/b"
    assert copied(Path("manifest.json")) is None
    assert copy.is_relative_to(store.copies)


def test_two_endpoints_share_no_copies(store, monkeypatch):
    mine = copy_of(Bucket.parse(f"{store.url}/m.json"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://user:word@other.example:9000/x")
    other = copy_of(Bucket.parse(f"{store.url}/m.json"))
    assert mine != other and "word" not in str(other)
    assert copied(mine) is None, "it belongs to another endpoint"


def test_compared_with_what_is_here(prep, store, small_there, tmp_path):
    found = prep("diff", small_there / "manifest.json", f"{store.url}/manifest.json", "--json")
    assert found.code == 0, found.err
    assert found.json["identical"] and found.json["same"] and not found.json["notes"]


def test_a_row_is_read_by_its_place(store, small_there):
    audit = open_manifest(read_manifest(Bucket.parse(f"{store.url}/manifest.json")))
    shard = next(one for one in audit.shards if one["field"] == "mask")
    reader = Reader(audit.cache)
    spec, rows = reader.array_info(shard["digest"], "mask")
    assert rows == 1 and spec.shape == (1, 8, 8)
    assert len(reader.keys(shard["digest"])) == 1
    with pytest.raises(CacheError, match=r"shard .* is not in the table of shards of any manifest that was read here"):
        reader.array_info("ab" * 32, "mask")
    reader.advise("mask", [RowRef(shard=shard["digest"], row=0)])
    reader.close()
