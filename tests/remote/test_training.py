"""Training from a cache in an object store: the same run, from copies that come once and in the order of the plan."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from runs import events
from torchrun import torchrun

from prep.cache.reader import Reader
from prep.cache.remote import quota
from prep.errors import CacheError
from prep.fs.remote import retry
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import WHOLE, mirror
from prep.fs.remote.errors import StoreError
from prep.loader import batches as module
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.index import open_index
from prep.loader.prefetch import prefetched
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest

RUN = ("--steps", 4, "--batch-size", 2, "--precision", "fp32", "--quiet")


@pytest.fixture
def made(make, store, tmp_path):
    """A dataset here and in the store."""
    found = make()
    home = tmp_path / "home"
    home.mkdir()
    shutil.copytree(tmp_path / "cache", home / "cache")
    shutil.copy(found.path, home / "m.json")
    store.upload(home)
    return found


def losses(run):
    return [one["loss"] for one in events(run) if one["event"] == "step"]


def test_a_run_is_the_one_from_the_disk(train, made, store, tiny_model, tmp_path):
    for name, manifest in (("here", made.path), ("there", f"{store.url}/m.json")):
        done = train("run", manifest, "--model", tiny_model, "-o", tmp_path / name, *RUN)
        assert done.code == 0, done.err
    assert losses(tmp_path / "here") == losses(tmp_path / "there")
    weights = [(tmp_path / name / "lora.safetensors").read_bytes() for name in ("here", "there")]
    assert weights[0][8:] and len(weights[0]) == len(weights[1])
    data = [path for method, path, _ in store.proxy.asked if "/c.0" in path and "key" not in path and method == "GET"]
    assert data and not [path for _, path, _ in store.proxy.asked if "list-type" in path]
    store.proxy.forget()
    again = train("run", f"{store.url}/m.json", "--model", tiny_model, "-o", tmp_path / "there", "--resume",
                  *RUN[:1], 6, *RUN[2:])
    assert again.code == 0, again.err
    assert [path.rpartition("/")[2] for _, path, _ in store.proxy.asked] == ["m.json"], "the copies are warm"
    assert len(losses(tmp_path / "there")) == 6
    told = train("worst", tmp_path / "there", "--json")
    assert told.code == 0, told.err


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "flip", *(pytest.param(fault, marks=pytest.mark.slow)
                                                    for fault in ("500", "drop", "truncate"))])
def test_each_request_of_a_run_fails_once(train, made, store, tiny_model, tmp_path, fault):
    """It is asked again, and the run is the one from the disk."""
    assert train("run", made.path, "--model", tiny_model, "-o", tmp_path / "here", *RUN).code == 0
    store.proxy.rule = lambda method, path, before: fault if before == 0 else ""
    done = train("run", f"{store.url}/m.json", "--model", tiny_model, "-o", tmp_path / "there", *RUN)
    assert done.code == 0, done.err
    failed = {path for method, path, one in store.proxy.asked if method == "GET" and one == fault}
    assert sum("/latent/c.0" in path for path in failed) == len(store.keys(made.root / "cache", "/latent/c.0")) == 2
    assert losses(tmp_path / "here") == losses(tmp_path / "there")


def test_credentials_that_are_refused_from_the_first_shard_on(train, made, store, tiny_model, tmp_path):
    store.proxy.rule = lambda method, path, before: "403" if method == "GET" and "/latent/c.0" in path else ""
    done = train("run", f"{store.url}/m.json", "--model", tiny_model, "-o", tmp_path / "run", *RUN)
    error, hint = done.err.splitlines()
    assert done.code == 7 and error.endswith(": the store answered 403 Forbidden (ExpiredToken)"), error
    assert hint.startswith("hint: check the credentials in the environment (AWS_ACCESS_KEY_ID, ")


def test_check_reads_headers_and_no_rows(train, made, store, tiny_model):
    told = train("check", f"{store.url}/m.json", "--model", tiny_model, "--json")
    assert told.code == 0, told.err
    there, here = told.json, train("check", made.path, "--model", tiny_model, "--json").json
    for document in (there, here):  # what this computer has and this process takes changes meanwhile
        document["memory"] = {**document["memory"], "free": 0, "peak": 0}
        document["memory"]["parts"] = {**document["memory"]["parts"], "libraries": 0}
    assert there == here
    assert not list(store.copies.glob("whole/*/*/*/cache/shards"))
    keys = store.keys(made.root, "latent/c.0")
    store.server.delete(f"{store.prefix}/{keys[0]}")
    shutil.rmtree(store.copies)
    told = train("check", f"{store.url}/m.json", "--model", tiny_model)
    assert told.code == 7 and "prep push MANIFEST" in told.err
    assert " is missing or incomplete: it has no latent/c.0.0.0.0\n" in told.err


def test_a_model_beside_the_manifest_is_not_guessed(train, made, store):
    told = train("check", f"{store.url}/m.json")
    assert told.code == 6
    assert f"error: {store.url}/m.json names the model " in told.err and "with --model" in told.err


def test_what_would_write_there_refuses(prep, made, store):
    told = prep("gc", f"{store.url}/cache", "--keep", made.path)
    assert told.code == 7 and f"is a manifest of the cache {made.path.parent / 'cache'}, expected one of" in told.err
    assert not (Path.cwd() / "s3:").exists()


PROGRAM = """
import sys
from prep.fs.place import place_of
from prep.cache.reader import Reader
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
audit = open_manifest(read_manifest(place_of(sys.argv[1])))
reader = Reader(audit.cache)
print(sum(reader.array_info(shard["digest"], array)[1] for shard in audit.shards for array in shard["shapes"]))
"""


def test_processes_of_one_computer_download_each_shard_once(made, store):
    copies = [subprocess.Popen([sys.executable, "-c", PROGRAM, f"{store.url}/m.json"], stdout=subprocess.PIPE,
                               env=dict(os.environ)) for _ in range(4)]
    counts = {one.communicate(timeout=60)[0] for one in copies}
    assert len(counts) == 1 and [one.returncode for one in copies] == [0] * 4
    data = [path for method, path, _ in store.proxy.asked if "/shards/" in path]
    assert len(data) == len(set(data)) == len(store.keys(made.root / "cache", "shards/"))


def fed(index, steps, setup):
    """The latents of the first steps, through the reading thread."""
    requests = draws.training(index, setup.plan, 0, steps, timesteps=1000)
    with batches(Rows(index), requests, masked=True, pinned=False) as feed:
        return [(batch.latent_BChw.clone(), batch.mask_B1hw.clone()) for batch in feed]


@pytest.fixture
def index(made, store):
    return open_index(read_manifest(Bucket.parse(f"{store.url}/m.json")))


def test_shards_come_in_the_order_of_the_plan(made, setup_of, index, store, monkeypatch):
    setup = setup_of(made, batch_size=2)
    monkeypatch.setattr("prep.loader.prefetch.JOBS", 1)
    here, there = fed(setup.index, 4, setup), fed(index, 4, setup)
    assert all((one == other).all() for first, second in zip(here, there, strict=True)
               for one, other in zip(first, second, strict=True))
    first = next(draws.training(index, setup.plan, 0, 1, timesteps=1000))
    wanted = Rows(index).shards_of(first, masked=True)
    order = list(dict.fromkeys(path.split("/shards/")[1].split("/")[1] for _, path, _ in store.proxy.asked
                               if "/shards/" in path and path.endswith("key/zarr.json")))
    assert wanted and set(order[: len(wanted)]) == wanted


def test_batches_that_are_not_wanted_any_more_are_not_waited_for(made, setup_of, index, store):
    """A store that hangs, and a Ctrl-C."""
    setup = setup_of(made, batch_size=2)
    store.proxy.rule = lambda method, path, before: "hang" if "/shards/" in path else ""
    requests = draws.training(index, setup.plan, 0, 4, timesteps=1000)
    with batches(Rows(index), requests, masked=True, pinned=False):
        assert store.proxy.hung.wait(20)
        begun = time.monotonic()
    assert time.monotonic() - begun < 10
    store.proxy.forget()


def test_what_is_least_used_goes_when_there_is_no_room(made, setup_of, index, monkeypatch):
    """With room for two shards, the same batches come, of copies that come and go."""
    setup = setup_of(made, batch_size=2)
    sizes = sorted(shard.bytes for shard in index.shards)
    tables = sum(path.stat().st_size for path in (mirror() / WHOLE).rglob("tables/*/*"))  # they stay
    most = tables + sum(sizes[-2:])
    monkeypatch.setenv(quota.LIMIT, str(most))
    monkeypatch.setattr(quota, "RESCAN", 0.0)
    monkeypatch.setattr("prep.loader.prefetch.JOBS", 1)
    here, there = fed(setup.index, 8, setup), fed(index, 8, setup)
    assert all((one == other).all() for first, second in zip(here, there, strict=True)
               for one, other in zip(first, second, strict=True))
    assert quota._copies()[0] <= most


@pytest.fixture
def late(monkeypatch):
    """Nothing is downloaded early, as where copies were removed to make room: the reader asks for each shard."""
    monkeypatch.setattr("prep.loader.batches.prefetched", lambda rows, requests, **_: requests)


@pytest.mark.parametrize(("fault", "hint"), [("503", "check the network and the store"), ("403", "check the cred")])
def test_a_store_that_does_not_answer_the_reader_is_asked_for_one_shard_and_told_as_such(
        made, setup_of, index, store, late, monkeypatch, fault, hint):
    setup = setup_of(made, batch_size=2, micro_batch=2)
    monkeypatch.setenv(retry.PATIENCE, "0.1")
    store.proxy.rule = lambda method, path, before: fault if "/shards/" in path else ""
    store.proxy.asked.clear()
    with pytest.raises(StoreError) as caught:
        fed(index, 4, setup)
    assert caught.value.hint.startswith(hint) and "needed for" not in caught.value.message
    assert len({path.split("/shards/")[1].split("/")[1] for _, path, _ in store.proxy.asked}) == 1


def test_room_that_other_processes_take_is_told_with_what_makes_more(made, setup_of, index, late, monkeypatch):
    setup = setup_of(made, batch_size=2)
    gone = FileNotFoundError(2, "removed")
    monkeypatch.setattr(Reader, "_opened_by_force", Mock(side_effect=gone))
    monkeypatch.setattr("prep.cache.reader.Path", lambda _: Mock(is_dir=lambda: False))
    with pytest.raises(CacheError, match="was removed 10 times") as caught:
        fed(index, 4, setup)
    assert caught.value.hint.startswith("allow copies more room") and "verify" not in caught.value.hint


@pytest.mark.slow
def test_a_run_whose_credentials_expire_says_how_it_goes_on(train, made, store, tiny_model, tmp_path, monkeypatch):
    """Copies of shards go when the first step has been made, and its credentials, too."""
    words = ("run", f"{store.url}/m.json", "--model", tiny_model, "-o", tmp_path / "run", *RUN)
    real = module.read

    def read(rows, request, *given, **named):
        if (tmp_path / "run/log.jsonl").exists() and losses(tmp_path / "run"):
            store.proxy.rule = lambda method, path, before: "403" if "/shards/" in path else ""
            rows.reader.close()
            shutil.rmtree(rows.reader._cache.root / "shards", ignore_errors=True)
        return real(rows, request, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, "read", read)
        patch.setattr(module, "SLOTS", 1)
        patch.setattr(module, "MOST_SLOTS", 1)
        told = train(*words)
    assert told.code == 7 and told.err.count("error: ") == 1
    assert "the store answered 403 Forbidden (ExpiredToken)\n" in told.err
    assert told.err.endswith("; then run the same command again with --resume\n")
    assert 1 <= len(losses(tmp_path / "run")) < 4, "finished steps are kept"
    store.proxy.forget()
    told = train(*words, "--resume")
    assert told.code == 0 and len(losses(tmp_path / "run")) == 4, told.err


@pytest.mark.parametrize(("sharing", "begun"), [(1, 8), (100, 2)])
def test_processes_of_one_computer_share_the_room(made, setup_of, index, monkeypatch, sharing, begun):
    """Each looks only so far ahead that the shards that all wait for have room."""
    setup = setup_of(made, batch_size=2)
    monkeypatch.setenv(quota.LIMIT, str(2 * sum(shard.bytes for shard in index.shards)))
    asked = []

    def requests():
        for request in draws.training(index, setup.plan, 0, 8, timesteps=1000):
            asked.append(request)
            yield request

    there = prefetched(Rows(index), requests(), masked=True, sharing=sharing)
    next(there)
    assert len(asked) == begun
    there.close()


@pytest.mark.slow
def test_too_little_room_for_all_shards_is_noted(train, made, store, tiny_model, monkeypatch):
    told = train("check", f"{store.url}/m.json", "--model", tiny_model)
    assert told.code == 0 and "note: " not in told.out
    monkeypatch.setenv(quota.LIMIT, "10KB")
    told = train("check", f"{store.url}/m.json", "--model", tiny_model)
    assert told.code == 0, told.err
    assert re.search(r"note: the shards have .* KiB, but copies of shards may take 10\.0 KiB here", told.out)


@pytest.mark.slow
def test_ranks_download_each_shard_once_and_train_as_one(train, made, store, tiny_model, tmp_path):
    url = f"{store.url}/m.json"
    words = ("run", url, "--model", tiny_model, "--set", "optimizer.name=adamw", *RUN)
    told = torchrun(2, *words, "-o", tmp_path / "two")
    assert told.returncode == 0, told.stderr
    asked = Counter(path for _, path, _ in store.proxy.asked if "/shards/" in path)
    assert max(asked.values()) <= 3, "size and shard index for the header, and the whole"
    assert train(*words, "-o", tmp_path / "one").code == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_limit_below_one_shard_is_told(train, made, store, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv(quota.LIMIT, "1KB")
    told = train("run", f"{store.url}/m.json", "--model", tiny_model, "-o", tmp_path / "run", *RUN)
    assert told.code == 7, told.err
    assert re.search(r"error: there is no room for .* in .*: 1\.0 KiB are allowed.*\n", told.err)
    assert "LATENTRY_REMOTE_DIR=DIR" in told.err and "LATENTRY_REMOTE_LIMIT=200GB" in told.err
    monkeypatch.setenv(quota.LIMIT, "much")
    told = train("run", f"{store.url}/m.json", "--model", tiny_model, "-o", tmp_path / "run", *RUN)
    assert told.code == 3 and "LATENTRY_REMOTE_LIMIT is 'much', expected a size like 200GB or 2TB" in told.err
