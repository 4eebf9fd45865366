"""`prep verify`: each damaged row by name, what it costs, and rows that are not their samples'."""

from __future__ import annotations

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from small_manifest import SQUARE, latent, write_shards

from prep.cache import damage
from prep.cache.ledger.index import NAME
from prep.cache.reader import Reader
from prep.cache.shard_check import verify_shard
from prep.cache.store import Cache
from prep.digest import canonical, with_checksum
from prep.errors import CacheError
from prep.maintenance.verify import WRONG_ROW, verify
from prep.manifest import describe as audit
from prep.manifest.document import read_manifest, write_manifest
from prep.manifest.opened import open_manifest
from prep.report.terminal.manifest import verify_tables


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
                        "bytes": size, "damaged": [], "notes": [], "unrecorded": [], "repair": {}}
    assert sum(ticks) == size


def test_a_damaged_row_is_named_with_its_sample_and_its_cost(small):
    digest = shard_of(small, "latent", [4, 8, 8])
    flip(data_of(small, digest, "latent"), 0)
    document = verify(small)
    (first,) = [name for name in ("a.png", "sub/b.png")
                if audit.describe_samples(small, name)["samples"][0]["views"][0]["latent"]["row"] == 0]
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
    write_manifest(path, document)
    found = verify(open_manifest(read_manifest(path)))
    assert {one["what"] for one in found["damaged"]} == {WRONG_ROW}
    assert {one["field"] for one in found["damaged"]} == {"text"}
    assert found["repair"] == {}


def changed(small, **changes):
    """The manifest with other values, sealed anew."""
    write_manifest(small.manifest.path, {**small.manifest.document, **changes})
    return open_manifest(read_manifest(small.manifest.path))


def with_context(small, field, **changes):
    fields = small.manifest.document["fields"]
    context = {**fields[field]["context"], **changes}
    return changed(small, fields={**fields, field: {**fields[field], "context": context}})


@pytest.mark.parametrize(("field", "samples"), [("latent", ["a.png", "c.png", "sub/b.png"]), ("mask", ["a.png"])])
def test_rows_of_other_pictures_or_another_vae_are_found_though_every_byte_is_sound(small, field, samples):
    found = verify(with_context(small, field, meaning=2))
    assert {one["what"] for one in found["damaged"]} == {WRONG_ROW}
    assert sorted(name for one in found["damaged"] for name in one["samples"]) == samples
    assert verify(with_context(small, field), quick=True)["ok"]


def test_a_latent_on_another_color_is_found_and_an_opaque_one_has_none(small):
    latents = small.manifest.document["latents"]
    for color in ([255, 255, 254], None):
        found = verify(changed(small, latents={**latents, "alpha": color}))
        assert [one["samples"] for one in found["damaged"]] == [["c.png"]]
    unsaid = {name: value for name, value in latents.items() if name != "alpha"}
    assert verify(changed(small, latents=unsaid))["ok"], "a manifest from before colors were said in it"


def test_masks_from_files_have_keys_that_nobody_knows(small):
    assert verify(with_context(small, "mask", meaning=2, origin="file"))["ok"]


def shard_entry(small, field):
    return next(shard for shard in small.shards if shard["field"] == field)


def commit_of(small, field):
    digest = shard_entry(small, field)["digest"]
    found = {path: json.loads(path.read_bytes()) for path in small.cache.root.glob("commits/*/*.json")}
    return next((path, document) for path, document in found.items() if document["shard"] == digest)


@pytest.mark.parametrize("quick", [False, True])
def test_a_damaged_commit_is_named(small, quick):
    path, _ = commit_of(small, "mask")
    flip(path, 40)
    found = verify(small, quick=quick)
    (damaged,) = found["damaged"]
    assert (damaged["field"], damaged["shard"], damaged["row"]) == ("commit", None, None)
    assert damaged["what"].startswith(f"commit {path.stem}: commit ")
    assert found["notes"] == [f"shard {shard_entry(small, 'mask')['digest']} has no intact commit; "
                              "prep encode writes one"]
    assert found["repair"] == {}


@pytest.mark.parametrize("change", [{"rows": 2}, {"bytes": 1}, {"field": "latent"}])
def test_a_commit_that_says_something_else_is_named(small, change):
    path, document = commit_of(small, "mask")
    path.write_bytes(canonical(with_checksum({**document, **change})))
    (damaged,) = verify(small)["damaged"]
    assert damaged["field"] == "commit" and damaged["what"].startswith(f"commit {path.stem}: ")
    assert f"bytes of shard {document['shard']}" in damaged["what"]


def test_a_commit_under_another_name_or_of_another_version_is_named(small):
    path, document = commit_of(small, "mask")
    other = small.cache.commit("ab" * 32)
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(path.read_bytes())
    (damaged,) = verify(small)["damaged"]
    assert f"commit is of task {path.stem}, expected the task in its file name" in damaged["what"]
    other.write_bytes(canonical(with_checksum({**document, "version": 2})))
    (damaged,) = verify(small)["damaged"]
    assert "version 2, expected 'latentry/commit' version 1" in damaged["what"]


def test_what_costs_nothing_is_a_note(small):
    _, document = commit_of(small, "mask")
    nowhere, task = "cd" * 32, "ef" * 32
    path = small.cache.commit(task)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(canonical(with_checksum({**document, "shard": nowhere, "task": task})))
    for kind in ("plans", "damaged"):
        (small.cache.root / kind).mkdir(exist_ok=True)
        small.cache.file(kind, nowhere).write_bytes(b"half a docum")
    found = verify(small)
    assert found["ok"] and found["damaged"] == []
    assert [note.replace(nowhere, "N").replace(task, "T") for note in found["notes"]] == [
        "commit T names shard N, which is missing; this manifest does not need it",
        "plan N is damaged; prep encode makes it again",
        "the damage record of shard N is damaged itself (damage record is not JSON: Expecting value: line 1 column 1 "
        "(char 0)); prep encode checks that shard"]
    assert f"note: plan {nowhere} is damaged" in verify_tables(found).replace("\n", " ")


@pytest.mark.parametrize(("table", "cost"), [("shards", None), ("samples", None), ("findings", {"latent": 2})])
def test_the_cost_is_not_known_where_no_table_says_which_rows_are_needed(small, table, cost):
    digest = shard_of(small, "latent", [4, 8, 8])
    shutil.rmtree(small.cache.shard(digest))
    small.cache.table(small.manifest.document["tables"][table]).unlink()
    found = verify(open_manifest(small.manifest))
    assert not found["ok"] and found["repair"] == cost
    perhaps = f"names shard {digest}, which is missing; perhaps this manifest needs it"
    assert [perhaps in note for note in found["notes"]] == ([True] if table == "shards" else [])
    words = ("the number of rows to re-encode is unknown without these tables" if cost is None else
             ": 2 latent rows will be re-encoded")
    assert verify_tables(found).endswith(words)


def test_a_table_that_says_something_else_of_a_sound_shard_is_named(small, monkeypatch):
    digest = shard_of(small, "latent", [4, 8, 8])
    monkeypatch.setitem(next(one for one in small.shards if one["digest"] == digest), "dtypes", {"latent": "float16"})
    for quick in (False, True):
        (damaged,) = verify(small, quick=quick)["damaged"]
        assert damaged["what"] == ("dtypes of this shard: {'latent': 'bfloat16'}, expected {'latent': 'float16'} as "
                                   "in the manifest's table")


@pytest.mark.parametrize("file", ["zarr.json", "latent/zarr.json", "key/zarr.json", "key/c.0.0"])
def test_quick_reads_documents_and_keys(small, file):
    path = small.cache.shard(shard_of(small, "latent", [4, 8, 8])) / file
    path.chmod(0o600)
    flip(path, 20)
    (damaged,) = verify(small, quick=True)["damaged"]
    assert damaged["row"] is None and damaged["samples"] == ["a.png", "sub/b.png"]


def test_quick_reads_shard_indexes(small):
    flip(data_of(small, shard_of(small, "latent", [4, 8, 8]), "latent"), -12)
    (damaged,) = verify(small, quick=True)["damaged"]
    assert damaged["what"] == "latent/c.0.0.0.0 has a damaged shard index"
    (damaged,) = verify(small)["damaged"]
    assert damaged["what"] == "latent/c.0.0.0.0 has a damaged shard index"
    assert verify(small)["repair"] == {}, "an index says nothing that cannot be told again"


@pytest.mark.parametrize("quick", [False, True])
def test_damage_that_cannot_be_recorded_is_named_with_what_repairs_it(small, monkeypatch, quick):
    """As on a read-only mount: `prep encode` by itself would know of nothing to repair."""
    digest = shard_of(small, "latent", [4, 8, 8])
    flip(data_of(small, digest, "latent"), -12)

    def read_only(*given, **named):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Cache, "write", read_only)
    found = verify(small, quick=quick)
    assert found["unrecorded"] == [digest] and damage.recorded(small.cache, digest) == ()
    assert "to repair, run prep encode --recheck where the cache is writable: " in (
        verify_tables(found))
    monkeypatch.undo()
    found = verify(small, quick=quick)
    assert found["unrecorded"] == [] and damage.recorded(small.cache, digest)
    assert "--recheck" not in verify_tables(found)
    monkeypatch.setattr(Cache, "write", read_only)
    assert verify(small, quick=quick)["unrecorded"] == [], "it was recorded before"


def test_a_missing_shard_needs_no_record(small):
    digest = shard_of(small, "latent", [4, 8, 8])
    shutil.rmtree(small.cache.shard(digest))
    assert verify(small)["unrecorded"] == [] == verify(small, quick=True)["unrecorded"]


def test_rows_that_another_shard_has_cost_nothing(small):
    """As after `prep compact`, or where two manifests share rows."""
    digest = shard_of(small, "latent", [4, 8, 8])
    whole = [latent(name, SQUARE) for name in ("a.png", "sub/b.png")]
    write_shards(small.cache, [*whole, latent("other.png", SQUARE)])
    flip(data_of(small, digest, "latent"), 0)
    assert verify(small)["repair"] == {}
    shutil.rmtree(small.cache.shard(digest))
    found = verify(small)
    assert found["repair"] == {} and len(found["damaged"]) == 1
    assert verify_tables(found).endswith("to repair, run prep encode again: no rows will be re-encoded")


def test_a_row_that_this_manifest_does_not_need_costs_it_nothing(small):
    """Two manifests share a shard; the row is the other's."""
    write_shards(small.cache, [latent("z.png", SQUARE)])
    digest = shard_of(small, "text", [2, 3])
    path = data_of(small, digest, "hidden")
    unused = changed(small, prompts={**small.manifest.document["prompts"], "samples": []})
    samples = [audit.describe_samples(unused, name)["samples"][0] for name in ("a.png", "c.png")]
    rows = {text["row"]["row"] for sample in samples for text in sample["texts"]}
    rows.add(unused.manifest.document["prompts"]["unconditional"]["row"])
    (other,) = set(range(4)) - rows
    flip(path, other * 16)
    found = verify(unused)
    assert [one["samples"] for one in found["damaged"]] == [[]] and found["repair"] == {}
    assert verify(small)["repair"] == {"text": 1}


def test_threads_find_the_same(small):
    for shard in small.shards:
        array = next(iter(shard["shapes"]))
        flip(data_of(small, shard["digest"], array), 1)
    found = verify(small, jobs=1)
    assert len(found["damaged"]) == 4 and found == verify(small, jobs=8)


def test_the_end_of_a_thread_is_the_end(small, monkeypatch):
    def broken(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("prep.maintenance.verify.verify_shard", broken)
    with pytest.raises(KeyboardInterrupt):
        verify(small)


def test_an_error_of_the_disk_is_placed_told_and_remembered(small, monkeypatch):
    digest = shard_of(small, "latent", [4, 8, 8])

    def failing(descriptor, buffers, offset):
        if offset == 0 and sum(len(buffer) * memoryview(buffer).itemsize for buffer in buffers) > 500:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(descriptor, buffers, offset)

    found = verify_shard(small.cache, digest, read_at=failing)
    assert [(one.row, one.what) for one in found] == [(0, "cannot be read: [Errno 5] Input/output error")]
    assert damage.recorded(small.cache, digest) == tuple(found)
    assert verify_shard(small.cache, digest) == [] and damage.recorded(small.cache, digest) == ()


def test_short_reads_are_no_damage(small):
    for shard in small.shards:
        def short(descriptor, buffers, offset):
            return os.preadv(descriptor, [memoryview(buffers[0])[:7]], offset)

        assert verify_shard(small.cache, shard["digest"], read_at=short) == []


def test_verify_forgets_the_look_up_when_files_are_not_as_they_seem(small):
    (small.cache.root / NAME).write_bytes(b"remembered")
    assert verify(small)["ok"] and (small.cache.root / NAME).exists()
    flip(commit_of(small, "mask")[0], 40)
    verify(small)
    assert not (small.cache.root / NAME).exists()


def test_two_that_verify_and_readers_at_the_same_time_lose_no_finding(small):
    """Each sees all, and what is remembered in the end is all."""
    digest = shard_of(small, "text", [2, 3])
    path = data_of(small, digest, "hidden")
    for row in range(4):
        flip(path, row * 16)

    def read(row):
        with pytest.raises(CacheError):
            Reader(small.cache).read_into(np.empty(12, np.uint8), digest, "hidden", row)

    with ThreadPoolExecutor(6) as pool:
        reading = [pool.submit(read, number % 4) for number in range(16)]
        found = list(pool.map(lambda _: verify(open_manifest(small.manifest)), range(4)))
        [one.result() for one in reading]
    assert all(document == found[0] for document in found) and len(found[0]["damaged"]) == 4
    assert {one.row for one in damage.recorded(small.cache, digest)} == {0, 1, 2, 3}
    assert not list((small.cache.root / "tmp").iterdir())


@pytest.mark.parametrize("quick", [False, True])
def test_something_else_in_the_place_of_a_shard_is_its_damage_alone(small, quick, tmp_path):
    digest = shard_of(small, "latent", [4, 8, 8])
    small.cache.shard(digest).rename(tmp_path / "elsewhere")
    (small.cache.root / "shards" / digest[:2] / digest).symlink_to(tmp_path / "elsewhere")
    found = verify(small, quick=quick)
    (damaged,) = found["damaged"]
    assert damaged["shard"] == digest and "is a link, expected a directory" in damaged["what"]
    assert found["repair"] == {"latent": 2}
