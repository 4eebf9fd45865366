"""prep push and prep pull: all or nothing is visible, nothing is sent twice, and what arrives is what was sent."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from large_tables import LARGE, enlarge, peak_of
from pictures import saved
from PIL import Image
from remote_rows import rows_of
from small_manifest import moved, write_small

from prep.cache.commits import read_commit
from prep.cache.ledger.ledger import commit_document, load_ledger
from prep.cache.records import Shard
from prep.cache.remote import upload
from prep.cache.remote.opening import open_to_encode
from prep.cache.store import open_cache
from prep.errors import CacheError
from prep.fs.remote import objects
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import list_objects, read_object, upload_file
from prep.maintenance import pull as pulling
from prep.maintenance.pull import pull
from prep.manifest.consistency import read_shards


def there(store, home):
    """Whether each file of the manifest is an object with its bytes."""
    names = ["manifest.json", "cache/latentry.json", *store.keys(home, "/shards/"), *store.keys(home, "/tables/")]
    return all(store.server.get(f"{store.prefix}/{name}") == (home / name).read_bytes() for name in names)


def fits(document, name):
    """Whether a document of --json is as its schema says."""
    path = Path(__file__).parents[2] / f"manifests/schemas/{name}.schema.json"
    return Draft202012Validator(json.loads(path.read_text())).is_valid(document)


def puts(store):
    return [path.partition(f"{store.prefix}/")[2] for method, path, _ in store.proxy.asked if method == "PUT"]


def test_an_upload_is_what_is_here_and_is_not_repeated(prep, store, home):
    told = prep("push", home / "manifest.json", store.url, "--json")
    assert told.code == 0, told.err
    assert told.json == {"format": "latentry/push", "version": 1, "url": f"{store.url}/manifest.json", "shards": 4,
                         "sent": 4, "bytes": told.json["bytes"]} and there(store, home)
    assert fits(told.json, "push")
    sent = puts(store)
    assert len(sent) == len(set(sent)) and sent[-1] == "manifest.json"
    for group in [name for name in sent if name.count("/") == 4 and name.endswith("zarr.json")]:
        folder = group.removesuffix("zarr.json")
        assert max(number for number, name in enumerate(sent) if name.startswith(folder)) == sent.index(group)
    assert rows_of(store_path(store)) == rows_of(home / "manifest.json")
    store.proxy.forget()
    again = prep("push", home / "manifest.json", f"{store.url}/manifest.json")
    assert again.code == 0 and again.out.endswith("/manifest.json: nothing sent, 4 shards were there\n")
    assert puts(store) == ["manifest.json"], "on condition that there is none"
    assert prep("verify", f"{store.url}/manifest.json").code == 0


def test_references_of_samples_come_back(prep, store, tmp_path):
    files = {f"../control/{color}.png": saved(Image.new("RGB", (60, 40), color)) for color in ("teal", "navy")}
    path = write_small(tmp_path / "home", references=files)
    assert prep("push", path, store.url).code == 0
    told = prep("pull", f"{store.url}/manifest.json", tmp_path / "back")
    assert told.code == 0, told.err
    for place in (tmp_path / "back" / "manifest.json", f"{store.url}/manifest.json"):
        assert prep("verify", place).code == 0
        (sample,) = prep("inspect", place, "--sample", "a.png", "--json").json["samples"]
        assert [one["name"] for one in sample["views"][0]["references"]] == [*files]
    assert rows_of(tmp_path / "back" / "manifest.json") == rows_of(path)


def store_path(store):
    return Bucket.parse(f"{store.url}/manifest.json")


@pytest.mark.parametrize("fault", [
    "503", "flip sent", *(pytest.param(name, marks=pytest.mark.slow)
                          for name in ("500", "drop", "truncate", "flip", "lose"))])
def test_each_request_goes_wrong_once(prep, store, home, fault, monkeypatch):
    monkeypatch.setattr(upload, "TRIES", 9)
    wrong = ("PUT",) if fault in ("lose", "flip sent") else ("PUT", "GET", "HEAD", "POST")
    # What is sent once without being read from its bytes' digest is the manifest and the marker: these are compared.
    store.proxy.rule = lambda method, path, before: fault if before == 0 and method in wrong and not (
        fault.startswith("flip") and path.endswith(("manifest.json", "latentry.json", "/zarr.json"))) else ""
    told = prep("push", home / "manifest.json", store.url)
    assert told.code == 0, told.err
    store.proxy.forget()
    assert there(store, home)
    assert prep("verify", f"{store.url}/manifest.json").code == 0


def test_what_reads_back_as_something_else_is_told(prep, store, home):
    store.proxy.rule = lambda method, path, before: "flip sent" if method == "PUT" and "/mask/c.0" in path else ""
    told = prep("push", home / "manifest.json", store.url)
    assert told.code == 7 and "does not read back as it was written, after 3 uploads\n" in told.err
    assert "manifest.json" not in puts(store), "no manifest names what is not whole"
    store.proxy.rule = lambda method, path, before: "flip sent" if method == "PUT" and "manifest" in path else ""
    told = prep("push", home / "manifest.json", store.url)
    assert told.code == 7 and "manifest.json does not read back as it was written\n" in told.err


@pytest.mark.parametrize("number", [pytest.param(6, marks=pytest.mark.slow), 23])
def test_a_killed_upload_is_continued(prep, store, home, number):
    seen = iter(range(10**6))
    store.proxy.rule = lambda method, path, before: (
        "hang" if method == "PUT" and next(seen) >= number else "")
    sender = subprocess.Popen([sys.executable, "-m", "prep", "push", home / "manifest.json", store.url, "--jobs", "1"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert store.proxy.hung.wait(60)
    sender.send_signal(signal.SIGKILL)
    sender.communicate()
    done = set(puts(store)[:-1])
    store.proxy.forget()
    assert prep("inspect", f"{store.url}/manifest.json").code == 4, "no manifest is there yet"
    store.proxy.forget()
    assert prep("push", home / "manifest.json", store.url).code == 0
    assert there(store, home) and not done & set(puts(store)) - {"cache/latentry.json"}


def commits_of(root):
    """The commits in a store, by their names below its cache, and the shard that each names."""
    return {name: json.loads(read_object(f"{root}/cache/commits/{name}", 1 << 20))["shard"]
            for name in list_objects(f"{root}/cache/commits")}


def test_a_push_that_ended_between_a_shard_and_its_commits_is_completed(prep, store, home):
    store.proxy.rule = lambda method, path, before: "403" if method == "PUT" and "/commits/" in path else ""
    assert prep("push", home / "manifest.json", store.url, "--jobs", 1).code == 7
    sent = {name.split("/")[3] for name in puts(store) if name.count("/") == 4 and name.endswith("/zarr.json")}
    assert len(sent) == 1 and not commits_of(store.url), "a shard is whole there, and has no commit"
    store.proxy.forget()
    again = prep("push", home / "manifest.json", store.url, "--json")
    assert again.code == 0 and again.json["sent"] == 3
    here = {path.relative_to(home / "cache/commits").as_posix() for path in home.glob("cache/commits/*/*.json")}
    there = commits_of(store.url)
    assert there.keys() == here and sent < set(there.values())
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    assert {shard.digest for shard in load_ledger(cache).shards} == set(there.values())


def test_a_download_has_commits_and_so_has_what_is_uploaded_from_it(prep, store, home, tmp_path):
    assert prep("push", home / "manifest.json", store.url).code == 0
    assert prep("pull", f"{store.url}/manifest.json", tmp_path / "new").code == 0
    new = open_cache(tmp_path / "new/cache", create=False)
    shards = list(new.shards())
    assert len(shards) == 4 and sorted(shard.digest for shard in load_ledger(new).shards) == shards
    assert prep("push", tmp_path / "new/manifest.json", f"{store.url}/again").code == 0
    assert sorted(commits_of(f"{store.url}/again").values()) == shards
    for path in (tmp_path / "new/cache/commits").rglob("*.json"):  # as pull left a cache before
        path.unlink()
    assert prep("push", tmp_path / "new/manifest.json", f"{store.url}/third").code == 0
    assert commits_of(f"{store.url}/third") == commits_of(f"{store.url}/again")
    (name,) = store.keys(tmp_path / "new", "mask/c.0")
    (tmp_path / "new" / name).chmod(0o644)
    (tmp_path / "new" / name).write_bytes(bytes((tmp_path / "new" / name).stat().st_size))
    assert prep("pull", f"{store.url}/manifest.json", tmp_path / "new", "--json").json["fetched"] == 1
    assert sorted(shard.digest for shard in load_ledger(new).shards) == shards, "what had no commit was checked"
    assert prep("verify", tmp_path / "new/manifest.json").code == 0


@pytest.mark.parametrize("damaged", [False, True])
def test_a_shard_whose_task_has_another_commit_there_gets_one_of_its_own(prep, store, home, damaged):
    """As two graphics cards make it: the same rows, with other bytes."""
    other = Shard(digest="ab" * 32, rows=1, bytes=1)
    here = open_cache(home / "cache", create=False)
    for task in here.names("commits"):
        commit = read_commit(here, task)
        data = b"{}" if damaged else commit_document(task, commit.field, other, [], {})
        store.server.put(f"{store.prefix}/cache/{here.commit(task).relative_to(here.root).as_posix()}", data)
    assert prep("push", home / "manifest.json", store.url).code == 0
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    assert sorted(shard.digest for shard in load_ledger(cache).shards) == list(here.shards())
    store.proxy.forget()
    assert prep("push", home / "manifest.json", store.url).code == 0
    assert not [name for name in puts(store) if "/commits/" in name]


def test_ctrl_c_ends_an_upload_and_says_so(store, home):
    store.proxy.rule = lambda method, path, before: "503" if "/shards/" in path else ""
    sender = subprocess.Popen([sys.executable, "-m", "prep", "push", home / "manifest.json", store.url],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not store.proxy.count(part="/shards/"):
        assert sender.poll() is None
    sender.send_signal(signal.SIGINT)
    _, err = sender.communicate(timeout=30)
    assert sender.returncode == 130 and err.startswith("interrupted; finished work is kept")


def test_damage_here_is_not_uploaded(prep, store, home):
    (name,) = store.keys(home, "mask/c.0")
    path = home / name
    path.chmod(0o644)
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    told = prep("push", home / "manifest.json", store.url)
    shard = name.split("/")[3]
    assert told.code == 7 and f"error: shard {shard} is damaged or missing here, so it is not uploaded\n" in told.err
    assert "--recheck" in told.err and "manifest.json" not in puts(store)
    path.unlink()
    assert " is damaged or missing here" in prep("push", home / "manifest.json", store.url).err
    table = store.keys(home, "/tables/")[0]
    (home / table).chmod(0o644)
    (home / table).write_bytes(b"")
    assert prep("push", home / "manifest.json", store.url).code == 7


def test_damage_there_is_mended_by_recheck(prep, store, home):
    assert prep("push", home / "manifest.json", store.url).code == 0
    (name,) = store.keys(home, "mask/c.0")
    data = (home / name).read_bytes()
    store.server.put(f"{store.prefix}/{name}", b"\1" + data[1:])
    assert prep("push", home / "manifest.json", store.url, "--json").json["sent"] == 0
    assert prep("push", home / "manifest.json", store.url, "--recheck", "--json").json["sent"] == 1
    assert there(store, home)
    store.server.put(f"{store.prefix}/{name}", data[:-1])
    assert prep("push", home / "manifest.json", store.url, "--json").json["sent"] == 1
    assert there(store, home)


def test_what_is_in_the_way(prep, store, home):
    store.server.put(f"{store.prefix}/manifest.json", b"something else")
    told = prep("push", home / "manifest.json", store.url)
    assert told.code == 5 and "manifest.json exists and is no manifest, so it is not replaced" in told.err
    store.server.put(f"{store.prefix}/manifest.json", b"x" * (1 << 20) + b"x")
    assert prep("push", home / "manifest.json", store.url).code == 5
    store.server.delete(f"{store.prefix}/manifest.json")
    store.server.put(f"{store.prefix}/cache/latentry.json", b"{}")
    told = prep("push", home / "manifest.json", store.url)
    assert told.code == 7 and "latentry.json is not the marker of a cache of this version" in told.err
    told = prep("push", home / "manifest.json", home.parent / "elsewhere")
    assert told.code == 5 and "is not in an object store, expected a URL like s3://bucket/dataset" in told.err
    told = prep("push", f"{store.url}/manifest.json", f"{store.url}/other")
    assert told.code == 5 and f"manifest {store.url}/manifest.json is in an object store, expected a path" in told.err


def test_no_cache_is_uploaded_into_another(prep, store, home):
    store.server.put(f"{store.prefix}/outer/latentry.json", b"{}")
    done = prep("push", home / "manifest.json", f"{store.url}/outer")
    assert done.code == 5 and done.err == (f"error: {store.url}/outer/cache would be a cache in another cache, "
                                           f"{store.url}/outer\nhint: name a place outside that one\n")
    assert not store.proxy.count("PUT")
    assert prep("push", home / "manifest.json", f"{store.url}/outer2").code == 0
    store.proxy.rule = lambda method, path, _: "403" if method == "HEAD" and path.endswith("latentry.json") else ""
    done = prep("push", home / "manifest.json", f"{store.url}/mine")
    assert done.code == 0, "credentials for this place alone will do"


def test_a_cache_elsewhere_lies_so_there(prep, store, tmp_path):
    """Names in a manifest stay as they are; a place outside the bucket is refused."""
    (tmp_path / "home" / "sets" / "a").mkdir(parents=True)
    write_small(tmp_path / "home")
    shutil.move(tmp_path / "home/cache", tmp_path / "home/sets/cache")
    moved(tmp_path / "home" / "manifest.json", tmp_path / "home/sets/a/m.json", "../cache")
    told = prep("push", tmp_path / "home/sets/a/m.json", f"{store.url}/sets/a")
    assert told.code == 0, told.err
    assert store.server.get(f"{store.prefix}/sets/cache/latentry.json")
    assert rows_of(store_path(store).parent / "sets/a/m.json") == rows_of(tmp_path / "home/sets/a/m.json")
    told = prep("push", tmp_path / "home/sets/a/m.json", "s3://bucket")
    assert told.code == 5 and "names the cache ../cache, which would lie outside the bucket of s3://bucket/" in told.err
    told = prep("pull", f"{store.url}/sets/a/m.json", tmp_path / "new")
    assert told.code == 5 and "names the cache ../cache, which would lie outside " in told.err
    store.server.put("m.json", (tmp_path / "home/sets/a/m.json").read_bytes())
    told = prep("inspect", "s3://bucket/m.json")
    assert told.code == 4 and "names the cache ../cache, which is outside its bucket" in told.err


def test_a_download_is_a_cache_like_any_other(prep, store, home, tmp_path):
    assert prep("push", home / "manifest.json", store.url).code == 0
    url, new = f"{store.url}/manifest.json", tmp_path / "new"
    told = prep("pull", url, new)
    assert told.code == 0 and re.fullmatch(f"{new / 'manifest.json'}: 4 shards .* downloaded\n", told.out), told.err
    assert (new / "manifest.json").read_bytes() == (home / "manifest.json").read_bytes()
    assert rows_of(new / "manifest.json") == rows_of(home / "manifest.json")
    assert prep("verify", new / "manifest.json").code == 0
    again = prep("pull", url, new, "--json").json
    assert fits(again, "pull") and again == {
        "format": "latentry/pull", "version": 1, "manifest": str(new / "manifest.json"), "shards": 4, "fetched": 0,
        "bytes": 0}
    (name,) = store.keys(new, "mask/c.0")
    (new / name).chmod(0o644)
    (new / name).write_bytes(b"\1" + (new / name).read_bytes()[1:])
    assert prep("pull", url, new, "--json").json["fetched"] == 0
    assert prep("pull", url, new, "--recheck", "--json").json["fetched"] == 1
    assert prep("verify", new / "manifest.json").code == 0
    told = prep("pull", home / "manifest.json", new)
    assert told.code == 5 and "is not in an object store, expected a URL like s3://bucket/dataset/manifest" in told.err
    (new / "manifest.json").write_text("mine")
    told = prep("pull", url, new)
    assert told.code == 5 and "exists and is no manifest, so it is not replaced" in told.err


@pytest.mark.parametrize("fault", ["503", "truncate", "flip"])
def test_a_download_with_faults(prep, store, home, tmp_path, fault, monkeypatch):
    assert prep("push", home / "manifest.json", store.url).code == 0
    monkeypatch.setattr("prep.cache.remote.shards.TRIES", 9)
    monkeypatch.setattr("prep.cache.remote.documents.TRIES", 9)
    store.proxy.rule = lambda method, path, before: fault if before == 0 else ""
    told = prep("pull", f"{store.url}/manifest.json", tmp_path / "new")
    assert told.code == 0, told.err
    assert rows_of(tmp_path / "new/manifest.json") == rows_of(home / "manifest.json")


def test_a_damaged_shard_is_not_downloaded(prep, store, home, tmp_path):
    assert prep("push", home / "manifest.json", store.url).code == 0
    (name,) = store.keys(home, "mask/c.0")
    store.server.put(f"{store.prefix}/{name}", b"\1" + (home / name).read_bytes()[1:])
    told = prep("pull", f"{store.url}/manifest.json", tmp_path / "new")
    assert told.code == 7 and "its bytes do not match its digest (downloaded 3 times)" in told.err
    assert not (tmp_path / "new/manifest.json").exists() and not list((tmp_path / "new").rglob("mask/c.0*"))


@pytest.mark.parametrize("fault", ["", "503", "drop", "lose"])
def test_large_files_go_in_parts(store, tmp_path, fault):
    data = os.urandom(objects.UPLOAD_PART + (5 << 20))
    (tmp_path / "large").write_bytes(data)
    store.proxy.rule = lambda method, path, before: fault if before == 0 else ""
    upload_file(f"{store.url}/large", tmp_path / "large")
    assert store.server.get(f"{store.prefix}/large") == data
    assert [method for method, _, _ in store.proxy.asked].count("POST") >= 2, "it was begun and completed"


def test_a_table_comes_in_pieces(store, home, tmp_path, monkeypatch):
    """Of a hundred million samples, it would not fit into memory. Without the proxy, which is in this process."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.server.port}")
    enlarge(home)
    store.upload(home)
    assert peak_of(lambda: pull(store_path(store), tmp_path / "there")) < LARGE / 2
    assert there(store, tmp_path / "there")


def test_a_table_whose_copy_changes_is_not_taken(store, small_there, tmp_path, monkeypatch):
    def damaging(remote, manifest):
        path = remote.table(manifest.document["tables"]["samples"])
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        return read_shards(remote, manifest)

    monkeypatch.setattr(pulling, "read_shards", damaging)
    with pytest.raises(CacheError, match="changed while it was copied"):
        pull(store_path(store), tmp_path / "there")
    assert not (tmp_path / "there" / "manifest.json").exists()
