"""Commands end at once, whatever the store: what threads ask of it ends with the command, not with its patience."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from pictures import draw

from prep.cache.reader import Reader
from prep.dataset.ingest import ingest_items
from prep.encode.engines.rows import picture_pixels
from prep.encode.engines.tools import Tools
from prep.fs.blob import Blob
from prep.fs.memo import Memo
from prep.fs.remote import retry
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.errors import Stopped
from prep.geometry import Placement
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.maintenance import recheck
from prep.maintenance.verify import verify
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.masks.generate import make_masks
from prep.masks.methods import MaskOptions
from prep.recipe.load import load_recipe
from prep.recipe.sampled import open_some
from prep.scan.scanner import scan
from prep.sources.item import Item
from prep.sources.readers import read_table, read_tar, readers
from prep.sources.walk import walk_source

SOON = 20.0  # seconds; patience is ten times as much


class Broken(Exception):
    pass


@pytest.fixture
def away(store, monkeypatch):
    """`away(part)`: from now on the store does not answer to requests for a key with `part`; returns an event that is
    set when it was asked."""
    monkeypatch.setenv(retry.PATIENCE, "200")

    def begin(part):
        asked = threading.Event()

        def rule(method, path, before):
            if part not in path or "list-type" in path:
                return ""
            asked.set()
            return "503"

        store.proxy.rule = rule
        return asked

    return begin


@pytest.fixture
def soon():
    """The test takes no longer than ending should."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < SOON


@pytest.fixture
def photos(store, tmp_path):
    """Pictures here and in the store, and the items of those in the store."""
    root = tmp_path / "photos"
    for name in ("a.png", "b.png"):
        draw(root / name, (96, 96), seed=1).with_suffix(".txt").write_text("a picture")
        for path in (root / name, (root / name).with_suffix(".txt")):
            store.server.put(quote(f"{store.prefix}/photos/{path.name}"), path.read_bytes())
    found = walk_source(Bucket.parse(f"{store.url}/photos"), source=0, masks="none")
    return [one for one in found if isinstance(one, Item)]


def first_then_broken(items, asked):
    """One item, and an error once the store was asked for it."""
    yield items[0]
    assert asked.wait(30)
    raise Broken


def test_an_error_while_pictures_are_ingested(store, photos, away, soon):
    recipe, asked = load_recipe(Bucket.parse(f"{store.url}/photos"), choices={}), away("a.png")
    with pytest.raises(Broken):
        list(ingest_items(first_then_broken(photos, asked), recipe, Memo(None), jobs=2))


def test_an_error_while_pictures_are_scanned(photos, away, soon):
    asked = away("a.png")
    with pytest.raises(Broken):
        scan(first_then_broken(photos, asked), jobs=2)


def test_an_error_while_pictures_are_encoded(store, away, soon):
    asked = away("a.png")
    job = SimpleNamespace(alpha="white", cell=(8, "mean"))
    work = SimpleNamespace(blob=Blob(file=f"{store.url}/photos/a.png"), digest="", name="a.png", key="", hole=None,
                           placement=Placement(scaled=(8, 8), crop=(0, 0), bucket=(8, 8)))
    with pytest.raises(Broken), Tools(1) as tools:
        made = tools.pool.submit(picture_pixels, job, work, tools.workers)
        assert asked.wait(30)
        raise Broken
    with pytest.raises(Stopped):
        made.result()


def test_an_error_while_a_table_or_a_tar_is_read(store, away, soon):
    """As the pool that would parse it is closed."""
    asked, told = away(".."), []
    for read, blob in ((read_table, Blob(file=f"{store.url}/a..jsonl")),
                       (read_tar, Blob(file=f"{store.url}/a..tar", version="x 2048"))):
        asked.clear()

        def reading(read=read, blob=blob):
            with pytest.raises(Stopped):
                read(pool, blob)
            told.append(blob.file)

        with readers() as pool:
            thread = threading.Thread(target=reading)
            thread.start()
            assert asked.wait(30)
        thread.join()
    assert len(told) == 2


def test_an_error_while_masks_are_made(photos, away, soon, tmp_path):
    asked = away("b.png")

    def tick(_):
        assert asked.wait(30)
        raise Broken

    with pytest.raises(Broken):
        make_masks(photos, MaskOptions(method="alpha"), out=tmp_path / "masks", tick=tick)


def test_an_error_while_a_source_is_looked_at(photos, away, soon):
    asked = away("b.png")

    def tick(_):
        assert asked.wait(30)
        raise Broken

    with pytest.raises(Broken):
        open_some(photos, 2, tick)


@pytest.fixture
def audit(store, small_there):
    return open_manifest(read_manifest(Bucket.parse(f"{store.url}/manifest.json")))


@pytest.mark.parametrize("quick", [True, False])
def test_an_error_while_shards_are_verified(audit, away, soon, quick):
    asked = away(audit.shards[-1]["digest"])

    def tick(_):
        assert asked.wait(30)
        raise Broken

    with pytest.raises(Broken):
        verify(audit, quick=quick, jobs=len(audit.shards), tick=tick)


def test_an_error_while_shards_are_verified_before_they_are_reused(audit, away, soon, monkeypatch):
    """As `test_an_error_while_shards_are_verified`."""
    digests = [shard["digest"] for shard in audit.shards]
    asked = away(digests[-1])
    monkeypatch.setattr(recheck, "forget_shard", lambda *_: None)

    def tick(_):
        assert asked.wait(30)
        raise Broken

    with pytest.raises(Broken):
        recheck._verify(audit.cache, digests, len(digests), tick)


def test_a_reader_that_fetches_a_shard_again(audit, away, soon):
    stop, shard = threading.Event(), next(one for one in audit.shards if one["field"] == "mask")
    reader = Reader(audit.cache)
    asked = away("/shards/")
    threading.Thread(target=lambda: (asked.wait(30), stop.set()), daemon=True).start()
    with pytest.raises(Stopped):
        reader.until(stop).array_info(shard["digest"], "mask")


def test_batches_that_are_not_wanted_any_more(make, setup_of, store, tmp_path, away, soon, monkeypatch):
    """A shard was removed to make room after it was there, and the reader fetches it again."""
    made, home = make(), tmp_path / "home"
    shutil.copytree(tmp_path / "cache", home / "cache")
    shutil.copy(made.path, home / "m.json")
    store.upload(home)
    index, setup = open_index(read_manifest(Bucket.parse(f"{store.url}/m.json"))), setup_of(made, batch_size=2)
    monkeypatch.setattr("prep.loader.batches.prefetched", lambda rows, requests, **_: requests)
    asked = away("/shards/")
    requests = draws.training(index, setup.plan, 0, 4, timesteps=1000)
    with batches(Rows(index), requests, masked=True, pinned=False):
        assert asked.wait(30)


@pytest.mark.slow
def test_a_signal_while_pictures_are_read(store, photos, tiny_model, tmp_path, monkeypatch):
    """Within the time of grace, and not when the store's patience ends."""
    asked = threading.Event()

    def rule(method, path, before):
        if "a.png" not in path or "list-type" in path or not before:  # it is read once to be ingested
            return ""
        asked.set()
        return "503"

    store.proxy.rule = rule
    words = ("encode", f"{store.url}/photos", "--model", tiny_model, "--cache", tmp_path / "cache", "-o",
             tmp_path / "m.json", "--resolution", 96, "--device", "cpu", "--grace", 1)
    process = subprocess.Popen([sys.executable, "-m", "prep", *map(str, words)], stderr=subprocess.PIPE, text=True,
                               env={**os.environ, retry.PATIENCE: "200"})
    assert asked.wait(90), process.communicate()[1]
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=100)[1]
    assert process.returncode == 75 and "stopped by SIGTERM" in told, told
    assert time.monotonic() - begun < SOON
