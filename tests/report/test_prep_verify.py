"""`prep verify`: each damaged row by name, what it costs, and rows that are not their samples'."""

from __future__ import annotations

import shutil

import pytest

from prep import audit
from prep import manifest as manifests
from prep.audit import open_audit
from prep.verify import WRONG_ROW, verify


def shard_of(audit, field, shape):
    (found,) = [one["digest"] for one in audit.shards if one["field"] == field and shape in one["shapes"].values()]
    return found


def data_of(audit, digest, array):
    (path,) = [path for path in (audit.cache.shard(digest) / array).iterdir() if path.name != "zarr.json"]
    path.chmod(0o600)
    return path


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("quick", [False, True])
def test_all_is_well(small, quick):
    ticks = []
    document = verify(small, quick=quick, tick=ticks.append)
    size = sum(shard["bytes"] for shard in small.shards)
    assert document == {"format": "latentry/verify", "version": 1, "ok": True, "quick": quick, "shards": 4,
                        "bytes": size, "damaged": [], "repair": {}}
    assert ticks == [1] * 4


def test_a_damaged_row_is_named_with_its_sample_and_its_cost(small):
    digest = shard_of(small, "latent", [4, 8, 8])
    flip(data_of(small, digest, "latent"), 0)
    document = verify(small)
    (first,) = [name for name in ("a.png", "sub/b.png")
                if audit.look_up(small, name)["samples"][0]["views"][0]["latent"]["row"] == 0]
    (damaged,) = document["damaged"]
    assert {name: damaged[name] for name in ("shard", "field", "row", "sample", "samples")} == {
        "shard": digest, "field": "latent", "row": 0, "sample": first, "samples": [first]}
    assert document["repair"] == {"latent": 1}
    assert not document["ok"]


def test_a_text_row_names_everybody_who_shares_it(small):
    digest = shard_of(small, "text", [2, 3])
    path = data_of(small, digest, "hidden")
    for at in range(0, 4 * 16, 16):  # 12 bytes a row, 4 of checksum
        flip(path, at)
    document = verify(small)
    assert {tuple(one["samples"]) for one in document["damaged"]} == {
        ("(prompt) a prompt", "(unconditional)"), ("(prompt) a prompt",), ("a.png",), ("c.png", "sub/b.png"),
    }
    assert document["repair"] == {"text": 4}


def test_a_missing_shard_costs_all_its_rows(small):
    shutil.rmtree(small.cache.shard(shard_of(small, "latent", [4, 8, 8])))
    for quick in (False, True):
        document = verify(small, quick=quick)
        (damaged,) = document["damaged"]
        assert (damaged["row"], damaged["what"]) == (None, "the shard is missing")
        assert damaged["samples"] == ["a.png", "sub/b.png"]
        assert document["repair"] == {"latent": 2}


def test_quick_sees_sizes_and_what_is_remembered(small):
    path = data_of(small, shard_of(small, "mask", [1, 8, 8]), "mask")
    flip(path, 0)
    assert verify(small, quick=True)["ok"]
    assert not verify(small)["ok"]  # and remembered
    assert verify(small, quick=True)["damaged"][0]["sample"] == "a.png"
    path.write_bytes(path.read_bytes() + b"x")
    what = verify(small, quick=True)["damaged"][0]["what"]
    size = next(shard["bytes"] for shard in small.shards if shard["field"] == "mask")
    assert what == f"has {size + 1} bytes, expected {size}"


@pytest.mark.parametrize("table", ["samples", "shards", "findings"])
def test_a_damaged_table_is_damage_too(small, table):
    path = small.cache.table(small.manifest.document["tables"][table])
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    document = verify(small)
    (damaged,) = document["damaged"]
    assert damaged["field"] == f"{table} table"
    assert damaged["what"].endswith("is damaged: its bytes do not match its name")
    assert document["shards"] == (0 if table == "shards" else 4)


def test_rows_of_another_caption_are_found_though_every_byte_is_sound(small):
    path, document = small.manifest.path, dict(small.manifest.document)
    document["fields"] = {**document["fields"], "text": {**document["fields"]["text"], "context": {"meaning": 2}}}
    manifests.write(path, document)
    found = verify(open_audit(manifests.read(path)))
    assert {one["what"] for one in found["damaged"]} == {WRONG_ROW}
    assert {one["field"] for one in found["damaged"]} == {"text"}
    assert found["repair"] == {}
