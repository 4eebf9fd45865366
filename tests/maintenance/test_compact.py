"""`prep compact`: a cache of many small shards becomes one of few, and the manifests before and after mean the same."""

from __future__ import annotations

import numpy as np
import pytest

from prep.cache.ledger.ledger import write_commit
from prep.cache.reader import Reader
from prep.cache.store import open_cache
from prep.fs.lock import lock_directory
from prep.maintenance import join as compacts
from prep.manifest.describe import describe
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest

SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu", "--mask", "sidecar", "--json")


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path, monkeypatch):
    """`encode(name, rows)`: shards of that many rows at most."""

    def go(name, rows=256):
        monkeypatch.setattr("prep.encode.plan.TASK_ROWS", rows)
        result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / name,
                      *SMALL)
        assert result.code == 0, result.err
        return result.json

    return go


def samples_of(path):
    """Every sample of a manifest with the bytes of its rows instead of their places."""
    audit = open_manifest(read_manifest(path))
    reader = Reader(audit.cache)

    def rows(place):
        if place is None:
            return None
        field = next(shard["field"] for shard in audit.shards if shard["digest"] == place["shard"])
        found = []
        for array in audit.manifest.fields[field].arrays:
            out = np.empty(reader.array_info(place["shard"], array)[0].row_bytes, np.uint8)
            reader.read_into(out, place["shard"], array, place["row"])
            found.append(out.tobytes())
        return found

    found = {}
    for number in range(len(audit.samples)):
        sample = describe(audit, number)
        for view in sample["views"]:
            view["latent"], view["mask"] = rows(view["latent"]), rows(view["mask"])
        for text in sample["texts"]:
            text["row"] = rows(text["row"])
        found[sample["name"]] = sample
    return found


def shards_of(path):
    return {shard["digest"] for shard in open_manifest(read_manifest(path)).shards}


def test_after_compact_and_gc_there_are_few_shards_with_the_same_rows(prep, train, encode, tmp_path):
    cache = tmp_path / "cache"
    encode("old.json", rows=1)
    dry = prep("compact", cache, "--dry-run", "--json").json
    assert dry["fields"]["text"] == {**dry["fields"]["text"], "joined": 7, "into": 1, "rows": 7}
    assert prep("compact", cache, "--dry-run").out.startswith("latent: would join ")
    done = prep("compact", cache, "--json")
    assert done.code == 0 and done.json["format"] == "latentry/compact" and not done.json["damaged"]
    for field, one in dry["fields"].items():
        assert {**one, "bytes": 0} == {**done.json["fields"][field], "bytes": 0}
        assert 0 < done.json["fields"][field]["bytes"] - one["bytes"] < 4096 * one["into"]
    again = prep("compact", cache)
    assert (again.code, again.out) == (0, "nothing to join\n")
    old, rows = shards_of(tmp_path / "old.json"), samples_of(tmp_path / "old.json")
    assert prep("verify", tmp_path / "old.json").code == 0
    assert encode("new.json")["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    new = shards_of(tmp_path / "new.json")
    assert len(new) < len(old) and samples_of(tmp_path / "new.json") == rows
    assert {one["field"] for one in open_manifest(read_manifest(tmp_path / "new.json")).shards
            if one["digest"] in old} <= {"latent", "mask"}  # alone in their buckets
    collected = prep("gc", cache, "--keep", tmp_path / "new.json", "--older-than", "0", "--yes", "--json").json
    assert collected["removed"]["shards"] == len(old - new) > 0
    assert set(open_cache(cache, create=False).shards()) == new
    assert prep("verify", tmp_path / "new.json").code == 0 and train("check", tmp_path / "new.json").code == 0
    assert samples_of(tmp_path / "new.json") == rows
    assert not any(encode("new.json")["encoded"].values())


def test_training_reads_the_same_from_old_and_new(prep, train, encode, tmp_path):
    """Also the very same weights: draws are keyed by samples, not by shards."""
    encode("old.json", rows=1)
    assert prep("compact", tmp_path / "cache", "--quiet").code == 0
    encode("new.json")
    weights = []
    for name in ("old", "new"):
        result = train("run", tmp_path / f"{name}.json", "-o", tmp_path / name, "--steps", 3, "--precision", "fp32",
                       "--device", "cpu", "--quiet", "--masked", "--set", "sample.every=0")
        assert result.code == 0, result.err
        weights.append((tmp_path / name / "lora.safetensors").read_bytes())
    # The header names the manifest that was trained; the tensors after it are equal.
    bodies = [one[8 + int.from_bytes(one[:8], "little"):] for one in weights]
    assert bodies[0] == bodies[1] and len(bodies[0]) > 1000


def test_a_damaged_row_is_said_and_mended(prep, encode, tmp_path):
    encode("m.json", rows=1)
    cache = tmp_path / "cache"
    path = next(cache.glob("shards/*/*/hidden/c*"))
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    shard = path.parent.parent.name
    dry = prep("compact", cache, "--dry-run")
    assert dry.code == 0
    result = prep("compact", cache)
    assert result.code == 7
    assert f"damaged, and dropped: text row 0 of shard {shard[:12]}\n" in result.out
    assert "to repair, run prep encode again as it was first run" in result.out
    assert prep("compact", cache, "--json").json["fields"] == {}
    assert encode("m.json")["encoded"] == {"latent": 0, "mask": 0, "text": 1}
    assert prep("verify", tmp_path / "m.json").code == 0


def test_an_interruption_costs_only_the_shard_in_the_making(prep, encode, tmp_path, monkeypatch):
    encode("m.json", rows=1)
    cache = open_cache(tmp_path / "cache", create=False)
    before, plain = set(cache.shards()), write_commit
    made = []

    def one_and_no_more(*args):
        if made:
            raise KeyboardInterrupt
        made.append(args[1])
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(compacts, "write_commit", one_and_no_more)
        assert prep("compact", cache.root).code == 130
    assert not list((cache.root / "tmp").iterdir())
    first = set(cache.shards()) - before
    assert len(first) == 2  # one has no commit yet
    rest = prep("compact", cache.root, "--json").json
    assert sum(one["into"] for one in rest["fields"].values()) == len(set(cache.shards()) - before) - 1
    assert prep("compact", cache.root, "--json").json["fields"] == {}


def test_compact_goes_beside_encoders_and_not_beside_gc(prep, encode, tmp_path, monkeypatch):
    monkeypatch.setattr("prep.maintenance.compact.PATIENCE", 0)
    encode("m.json", rows=1)
    cache = open_cache(tmp_path / "cache", create=False)
    with lock_directory(cache.root, exclusive=True):
        result = prep("compact", cache.root)
        assert result.code == 7 and "is being cleaned by another process" in result.err
    with lock_directory(cache.root, exclusive=False):
        assert prep("compact", cache.root).code == 0


def test_what_is_no_cache(prep, tmp_path):
    for command in ("compact", "gc"):
        result = prep(command, tmp_path / "nothing", *(("--keep", "m.json") if command == "gc" else ()))
        assert result.code == 7 and "there is no cache in" in result.err
