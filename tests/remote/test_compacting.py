"""prep compact in a store makes what it makes on a disk, in little room, and loses nothing whenever it is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pictures import draw
from small_rows import LATENT, draw_rows, put_shard

from prep.arrays import ArraySpec
from prep.cache.commits import parse_commit
from prep.cache.ledger.ledger import write_commit
from prep.cache.records import Reject, Task
from prep.cache.remote import gather
from prep.cache.store import cache_at, open_cache
from prep.digest import digest_bytes, digest_json
from prep.errors import CacheError
from prep.fs.place import place_of
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import list_objects
from prep.fs.tree import listing_digest
from prep.maintenance.compact import compact
from prep.progress import silent

POOLED = ArraySpec(name="pooled", dtype="float32", shape=(16,))
SMALL = 4096 + 40 * 100  # bytes of a shard that has 40 rows of latents


def add(cache, rows, specs=(LATENT,), field="latent", rejects=()):
    shard = put_shard(cache, field, specs, rows)
    task = Task(key=digest_json({"field": field, "rows": list(rows)}), field=field, rows=tuple(rows))
    write_commit(cache, task, shard, rejects, {"host": "here"})
    return shard


def every(rows, start, step):
    return {key: rows[key] for key in list(rows)[start::step]}


@pytest.fixture
def small(tmp_path, store):
    """A cache of small shards, here and in the store: rows of some are in others, too, and one has a rejected row."""
    cache = open_cache(tmp_path / "cache", create=True)
    rows, texts = draw_rows([LATENT], 60), draw_rows([POOLED, LATENT], 12, seed=1)
    for start in range(6):
        add(cache, every(rows, start, 6), rejects=[Reject(key="ab" * 32, code="decode", detail="x")][: start == 2])
    add(cache, every(rows, 1, 4))
    for start in range(3):
        add(cache, every(texts, start, 3), (POOLED, LATENT), "text")
    add(cache, draw_rows([LATENT], 70, seed=2))  # large
    store.upload(tmp_path)
    return cache.root


def joined(path, shard_bytes=SMALL):
    return compact(place_of(path), shard_bytes=shard_bytes, dry_run=False, progress=silent)


def as_on_a_disk(small, tmp_path):
    """The files of the cache, joined here."""
    shutil.copytree(small, tmp_path / "disk/cache")
    return joined(tmp_path / "disk/cache"), files(tmp_path / "disk")


def files(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
            and path.name != "lock" and "lookup" not in path.name}


def objects(store):
    store.proxy.forget()
    return {name: store.server.get(f"{store.prefix}/{name}") for name in list_objects(store.url)}


def without_rejects(there):
    """What is stored. After an interruption a rejected row may be told by another commit than otherwise, or by two."""
    return {name: replace(parse_commit(data, Path(name).stem, name), rejects=()) if "/commits/" in name else data
            for name, data in there.items()}


def rejected(there):
    return {one for name, data in there.items() if "/commits/" in name
            for one in parse_commit(data, Path(name).stem, name).rejects}


def is_complete(store, wanted):
    there = objects(store)
    assert without_rejects(there) == without_rejects(wanted) and rejected(there) == rejected(wanted)
    return True


def sound(store, but=""):
    """Whether each commit in the store names a shard whose bytes match its digest."""
    there = objects(store)
    for name, data in there.items():
        if "/commits/" in name and (shard := parse_commit(data, Path(name).stem, name).shard.digest) != but:
            prefix = f"cache/shards/{shard[:2]}/{shard}/"
            assert shard == listing_digest([
                {"path": one.removeprefix(prefix), "size": len(bytes_), "sha256": digest_bytes(bytes_)}
                for one, bytes_ in there.items() if one.startswith(prefix)])
    return there


def test_the_store_has_what_a_disk_would_have(small, store, tmp_path):
    """Shards and commits, byte for byte; each small shard is downloaded once."""
    here, wanted = as_on_a_disk(small, tmp_path)
    before = objects(store)
    dry = compact(Bucket.parse(f"{store.url}/cache"), shard_bytes=SMALL, dry_run=True, progress=silent)
    assert objects(store) == before and not store.proxy.count("PUT")
    there = joined(f"{store.url}/cache")
    rows = [path for method, path, _ in store.proxy.asked if method == "GET" and "/latent/c." in path]
    assert len(rows) >= 10 and max(Counter(rows).values()) <= 2, "what was made is read back, too"
    assert objects(store) == wanted and len(wanted) > len(before)
    assert there.as_json() == here.as_json() and not there.lost
    assert {name: tally.into for name, tally in there.fields.items()} == {"latent": 2, "text": 1}
    assert {name: (tally.into, tally.rows) for name, tally in dry.fields.items()} == {
        name: (tally.into, tally.rows) for name, tally in there.fields.items()}
    assert not list(store.copies.glob("**/tmp/*")) and not list(store.copies.glob("**/unsent/*/*/*"))
    assert joined(f"{store.url}/cache").as_text() == "nothing to join"


def test_the_small_shards_take_room_of_copies(small, store, monkeypatch):
    """They are downloaded all at once, or nothing is done; what is made is kept as a copy if there is room."""
    most, download = 0, gather.download_shard

    def measured(*words, **options):
        nonlocal most
        download(*words, **options)
        most = max(most, sum(path.stat().st_size for path in store.copies.rglob("c.0*")))

    monkeypatch.setattr(gather, "download_shard", measured)
    monkeypatch.setattr(gather, "JOBS", 1)
    before = objects(store)
    monkeypatch.setenv("LATENTRY_REMOTE_LIMIT", "9000")
    with pytest.raises(CacheError, match=r"there is no room for .*: 8\.8 KiB are allowed"):
        joined(f"{store.url}/cache")
    assert objects(store) == before and not most
    monkeypatch.setenv("LATENTRY_REMOTE_LIMIT", "60000")
    joined(f"{store.url}/cache")
    assert 9000 < most < 60000 and len(objects(store)) > len(before)


def test_where_nothing_is_to_be_joined_nothing_is_downloaded(small, store, monkeypatch):
    """So neither room is made, at the cost of copies, nor is there an error if the tables take all that is allowed."""
    joined(f"{store.url}/cache")
    table = cache_at(Bucket.parse(f"{store.url}/cache")).table("ab" * 32)
    table.parent.mkdir(parents=True)
    table.write_bytes(bytes(100))
    monkeypatch.setenv("LATENTRY_REMOTE_LIMIT", "50")
    before, phases = files(store.copies), []

    def progress(what, total, unit):
        phases.append(what)
        return silent(what, total, unit)

    report = compact(Bucket.parse(f"{store.url}/cache"), shard_bytes=SMALL, dry_run=False, progress=progress)
    assert report.as_text() == "nothing to join" and "downloading" not in phases
    assert files(store.copies) == before


@pytest.mark.parametrize("fault", ["flip", *(pytest.param(fault, marks=pytest.mark.slow) for fault in (
    "500", "drop", "lose", "truncate", "flip sent"))])
def test_each_request_goes_wrong_once(small, store, tmp_path, monkeypatch, fault):
    for module in ("headers", "shards", "stored", "upload"):
        monkeypatch.setattr(f"prep.cache.remote.{module}.TRIES", 9)
    wrong = ("PUT",) if fault in ("lose", "flip sent") else ("PUT", "GET", "HEAD", "POST")
    here, wanted = as_on_a_disk(small, tmp_path)
    # Lists of objects have no checksum; TLS has.
    store.proxy.rule = lambda method, path, before: fault if before == 0 and method in wrong and not (
        fault.startswith("flip") and ("list-type" in path or path.endswith("latentry.json"))) else ""
    assert joined(f"{store.url}/cache").as_json() == here.as_json()
    if fault == "flip sent":  # a commit that arrived damaged does not count elsewhere, and is replaced from there
        monkeypatch.setenv("LATENTRY_REMOTE_DIR", str(tmp_path / "elsewhere"))
        joined(f"{store.url}/cache")
    assert is_complete(store, wanted)


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in range(5))])
def test_an_end_at_any_request_loses_nothing(small, store, tmp_path, step):
    """From one request on all are refused, and again later, until a run gets through; the slow ones try each."""
    _, wanted = as_on_a_disk(small, tmp_path)
    before, ends = objects(store), 0
    for last in range(step, 1000, 5 if step < 3 else 29):
        count = iter(range(10**6))
        store.proxy.rule = lambda method, path, before, count=count, last=last: "403" if next(count) >= last else ""
        try:
            joined(f"{store.url}/cache")
            break
        except CacheError:
            ends += 1
        there = sound(store)
        assert before.items() <= there.items()
        assert {name for name in there if "/commits/" in name} <= wanted.keys()
    assert ends > 2
    store.proxy.forget()
    joined(f"{store.url}/cache")
    assert is_complete(store, wanted)


JOIN = """
import sys
from prep.fs.place import place_of
from prep.maintenance.compact import compact
from prep.progress import silent
compact(place_of(sys.argv[1]), shard_bytes=int(sys.argv[2]), dry_run=False, progress=silent)
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", ["/shards/", "PUT", "/commits/"])
def test_a_killed_process_leaves_nothing_half_visible(small, store, tmp_path, part):
    _, wanted = as_on_a_disk(small, tmp_path)
    for number in (1, 9):
        store.proxy.forget()
        seen = iter(range(10**6))
        store.proxy.rule = lambda method, path, before, seen=seen, number=number: (
            "hang" if method in ("PUT", "POST") and part in f"{method}{path}" and next(seen) >= number - 1 else "")
        child = subprocess.Popen([sys.executable, "-c", JOIN, f"{store.url}/cache", str(SMALL)], env=dict(os.environ))
        while not store.proxy.hung.wait(0.1) and child.poll() is None:
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert without_rejects(sound(store)).items() <= without_rejects(wanted).items()
    joined(f"{store.url}/cache")
    assert is_complete(store, wanted)
    assert not list(store.copies.glob("**/unsent/tmp/*")), "what the killed ones left is removed"


def test_damaged_rows_are_told_and_shards_of_another_digest_are_not_trusted(small, store, tmp_path):
    """As on a disk; but what is in the store stays as it is, until prep encode --recheck."""
    there = files(small.parent)
    name = next(name for name in there if name.endswith("pooled/c.0.0"))
    data = bytearray(there[name])
    data[5] ^= 1
    whole = next(name for name in sorted(there) if name.endswith("latent/c.0.0.0.0") and len(there[name]) < 2000
                 and f"{Path(name).parents[1]}/pooled/c.0.0" not in there)
    swapped = np.frombuffer(there[whole], np.uint8).copy()
    stride = LATENT.row_bytes + 4
    swapped[:stride], swapped[stride:2 * stride] = swapped[stride:2 * stride].copy(), swapped[:stride].copy()
    for key, bytes_ in ((name, bytes(data)), (whole, swapped.tobytes())):
        store.server.put(f"{store.prefix}/{key}", bytes_)
        (small.parent / key).chmod(0o644)
        (small.parent / key).write_bytes(bytes_)
    here, wanted = as_on_a_disk(small, tmp_path)
    there = joined(f"{store.url}/cache")
    assert there.lost == here.lost and there.lost
    assert {one.places[0][0] for one in there.lost} == {name.split("/")[3], whole.split("/")[3]}
    assert objects(store) == {key: data for key, data in wanted.items() if "/damaged/" not in key}
    assert "to repair, run prep encode again as it was first run, with --recheck" in there.as_text()
    assert "as it was first run\n" in here.as_text()


def test_rows_of_an_object_that_became_shorter_are_told(small, store, monkeypatch):
    """After the store was listed: before, its shard would not count."""
    name = next(f"cache/{name}" for name in store.keys(small, "/latent/c.0") if (small / name).stat().st_size < 2000)
    digest, data, download = name.split("/")[3], store.server.get(f"{store.prefix}/{name}")[:100], gather.download_shard

    def shorter(*words, **options):
        store.server.put(f"{store.prefix}/{name}", data)
        download(*words, **options)

    monkeypatch.setattr(gather, "download_shard", shorter)
    told = joined(f"{store.url}/cache")
    assert told.lost and all((digest in dict(one.places)) for one in told.lost)
    sound(store, but=digest)


def test_a_shard_that_goes_meanwhile_is_told(small, store):
    """To prep gc, for example: it may remove what no kept manifest needs."""
    def remove(method, path, before):
        if path.endswith("/latent/c.0.0.0.0") and method == "GET":
            return "404"
        return ""

    store.proxy.rule = remove
    with pytest.raises(CacheError, match="is missing or incomplete: it has no latent/c"):
        joined(f"{store.url}/cache")
    sound(store)


@pytest.mark.slow
def test_encode_and_gc_go_on_with_joined_shards(store, prep, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("prep.encode.plan.TASK_ROWS", 1)
    for number in range(3):
        draw(tmp_path / "photos" / f"{number}.png", (96, 96), seed=number).with_suffix(".txt").write_text(f"a {number}")
    cache, url = f"{store.url}/cache", f"{store.url}/m.json"
    words = ("encode", tmp_path / "photos", "--model", tiny_model, "--cache", cache, "-o", url, "--resolution", 96,
             "--device", "cpu", "--json")
    assert prep(*words).code == 0
    old = json.loads(store.server.get(f"{store.prefix}/m.json"))
    told = prep("compact", cache)
    assert told.code == 0 and "latent: joined 3 shards into 1 (3 rows, " in told.out
    assert prep("verify", url).code == 0
    told = prep(*words)
    assert told.code == 0 and not any(told.json["encoded"].values())
    assert old["tables"]["shards"] != json.loads(store.server.get(f"{store.prefix}/m.json"))["tables"]["shards"]
    done = prep("gc", cache, "--keep", url, "--older-than", 0, "--yes", "--json").json
    assert done["removed"]["shards"] == 7 and done["kept"]["shards"] == 2
    assert prep("verify", url).code == 0
    told = prep("compact", f"{store.url}/none")
    assert told.code == 7 and "none: it has no latentry.json" in told.err
