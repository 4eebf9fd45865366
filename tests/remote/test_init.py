"""Weights in a store from which a run begins: each computer downloads them once, whatever begins there at a time."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from urllib.parse import quote

import pytest
from s3_server import BUCKET

from prep.fs.remote.bucket import Bucket
from prep.runs.documents import with_checksum
from train.runs.stored.reading import for_init

RANKS = 4
FILES = {name: bytes(range(256)) * 4096 + name.encode()
         for name in ("lora.safetensors", "model.safetensors", "optimizer.safetensors")}


@pytest.fixture
def url(store):
    """A run of one checkpoint."""
    facts = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in FILES.items()}
    state = with_checksum({"format": "latentry/checkpoint", "version": 3, "step": 5, "manifest": "", "data": {},
                           "base": {}, "config": {}, "micro_batch": 1, "adopted": [], "init": {}, "meaning": 2,
                           "files": facts})
    place = f"{store.prefix}/runs/cat"
    for name, data in {**FILES, "state.json": state}.items():
        store.server.put(f"{place}/checkpoints/step-000005/{name}", data)
    store.server.put(f"{place}/run.json", b"{}")
    store.server.put(f"{place}/lora.safetensors", FILES["lora.safetensors"])
    return f"{store.url}/runs/cat"


def begin(url, environment, together, answers):
    """What a rank does: it takes the weights and reads them; the others may still be at it."""
    os.environ.update(environment)
    from train.runs.stored.reading import for_init

    together.wait()
    try:
        found = for_init(Bucket.parse(url)).path
        together.wait()
        weights = found if found.is_file() else next(found.rglob("model.safetensors"))
        answers.put(hashlib.sha256(weights.read_bytes()).hexdigest())
    except BaseException as error:
        together.abort()
        answers.put(f"{type(error).__name__}: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("place", [
    "", *(pytest.param(place, marks=pytest.mark.slow) for place in ("/checkpoints/step-000005", "/lora.safetensors"))])
def test_ranks_of_one_computer_begin_with_the_same_weights_downloaded_once(store, url, place):
    processes = multiprocessing.get_context("spawn")
    together, answers = processes.Barrier(RANKS, timeout=60), processes.Queue()
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "LATENTRY_"))}
    ranks = [processes.Process(target=begin, args=(url + place, environment, together, answers)) for _ in range(RANKS)]
    for rank in ranks:
        rank.start()
    told = [answers.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    name = "lora.safetensors" if place.endswith(".safetensors") else "model.safetensors"
    assert told == [hashlib.sha256(FILES[name]).hexdigest()] * RANKS
    assert store.proxy.count("GET", name) == 1 and not store.proxy.count("GET", "optimizer")
    assert not list(store.copies.rglob("*.partial"))


def test_what_the_store_has_no_more_goes_and_what_is_as_there_stays(store, url):
    """Leftovers of killed programs go, too; what another program downloads just now does not."""
    copy = for_init(Bucket.parse(url)).path
    (weights,) = copy.rglob("model.safetensors")
    before = weights.stat().st_ino
    coming, left = copy / f".{'a' * 16}.partial", copy / f".{'b' * 16}.partial"
    for path in (coming, left, copy / "README.md"):
        path.write_bytes(b"")
    os.utime(left, (0, 0))
    (copy / "checkpoints" / ".step-000004.partial").mkdir()
    assert for_init(Bucket.parse(url)).path == copy
    assert {path.name for path in copy.iterdir()} == {coming.name, "run.json", "checkpoints"}
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["step-000005"]
    assert weights.stat().st_ino == before
    assert for_init(Bucket.parse(f"{url}/checkpoints/step-000005")).path == weights.parent
    assert weights.stat().st_ino == before


def test_a_file_is_found_by_its_own_key_alone(store, url):
    """In a bucket's root, too; nothing is listed, which could take as long as its folder has objects."""
    for place, key in ((f"s3://{BUCKET}/{store.prefix}.safetensors", f"{store.prefix}.safetensors"),
                       (f"{store.url}/a.safetensors", f"{store.prefix}/a.safetensors")):
        store.server.put(key, b"weights")
        assert for_init(Bucket.parse(place)).path.read_bytes() == b"weights"
        assert for_init(Bucket.parse(place)).path.read_bytes() == b"weights"
        assert store.proxy.count("GET", key) == 1
        store.server.put(key, b"others")
        assert for_init(Bucket.parse(place)).path.read_bytes() == b"others"
        store.server.delete(key)
        assert not for_init(Bucket.parse(place)).path.exists(), "what is gone there is gone here"
    assert not store.proxy.count("GET", "list-type")


@pytest.mark.parametrize("name", ["model#1.safetensors", "model?2.safetensors", "model\\3.safetensors"])
def test_files_of_a_denoiser_may_have_keys_of_all_kinds(store, name):
    store.server.put(quote(f"{store.prefix}/denoiser/{name}"), b"weights")
    assert (for_init(Bucket.parse(f"{store.url}/denoiser")).path / name).read_bytes() == b"weights"
