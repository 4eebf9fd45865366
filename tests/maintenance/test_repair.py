"""Damage is found, named and mended: only the rows that are lost are encoded again."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from prep.cache import shard_check as verify
from prep.cache.store import open_cache
from prep.manifest.document import read_manifest

SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu", "--mask", "sidecar")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Where the first encode of these tests is kept, so that the others begin with a copy of it."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path, whole):
    """`encode()`: the document of the command."""

    def go():
        if (whole / "m.json").exists() and not (tmp_path / "cache").exists():
            shutil.copytree(whole / "cache", tmp_path / "cache")
            shutil.copy(whole / "m.json", tmp_path / "m.json")
        result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                      *SMALL, "--json")
        assert result.code == 0, result.err
        if not (whole / "m.json").exists():
            shutil.copytree(tmp_path / "cache", whole / "cache")
            shutil.copy(tmp_path / "m.json", whole / "m.json")
        return result.json

    return go


def payload(cache: Path, array: str) -> Path:
    """The largest data file of an array in the cache."""
    found = [path for path in cache.glob(f"shards/*/*/{array}/*") if path.name != "zarr.json"]
    return max(found, key=lambda path: path.stat().st_size)


def flip(path: Path, place: int) -> None:
    """Flips a bit, past the write protection of shards."""
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_flipped_bit_costs_one_row(prep, encode, tmp_path):
    encode()
    flip(payload(tmp_path / "cache", "latent"), 100)
    result = prep("verify", tmp_path / "m.json", "--json")
    assert result.code == 7 and not result.json["ok"]
    (damage,) = result.json["damaged"]
    assert (damage["field"], damage["row"]) == ("latent", 0) and damage["sample"]
    assert encode()["encoded"] == {"latent": 1, "mask": 0, "text": 0}
    assert prep("verify", tmp_path / "m.json").code == 0
    assert encode()["encoded"] == {"latent": 0, "mask": 0, "text": 0}


@pytest.mark.parametrize("spoil", ["empty", "delete file", "delete shard"])
def test_a_lost_shard_is_made_again(prep, encode, tmp_path, spoil):
    encode()
    before = read_manifest(tmp_path / "m.json").digest
    path = payload(tmp_path / "cache", "latent")
    path.chmod(0o644)
    if spoil == "delete shard":
        shutil.rmtree(path.parent.parent)
    elif spoil == "delete file":
        path.unlink()
    else:
        path.write_bytes(b"")
    assert prep("verify", tmp_path / "m.json").code == 7
    assert prep("verify", tmp_path / "m.json", "--quick").code == 7
    again = encode()
    assert again["encoded"]["latent"] > 0 and again["encoded"]["text"] == 0
    assert prep("verify", tmp_path / "m.json").code == 0
    assert read_manifest(tmp_path / "m.json").digest == before  # the same rows in the same shards


def rows_in(path: Path) -> int:
    return json.loads((path.parent / "zarr.json").read_bytes())["shape"][0]


@pytest.mark.parametrize("told", [True, False])
def test_a_torn_shard_costs_the_rows_behind_the_tear(prep, encode, tmp_path, told):
    """Also where nobody has verified: encode looks itself into what does not count."""
    encode()
    path = payload(tmp_path / "cache", "latent")
    path.chmod(0o644)
    rows, size = rows_in(path), path.stat().st_size
    assert rows > 2
    path.write_bytes(path.read_bytes()[: size // 2])
    if told:
        result = prep("verify", tmp_path / "m.json", "--json")
        assert result.code == 7 and result.json["repair"] == {"latent": rows - rows // 2}
        assert all(one["sample"] for one in result.json["damaged"] if one["row"] is not None)
    assert encode()["encoded"] == {"latent": rows - rows // 2, "mask": 0, "text": 0}
    assert prep("verify", tmp_path / "m.json").code == 0


@pytest.mark.parametrize("told", [True, False])
def test_a_lost_shard_index_costs_nothing(prep, encode, tmp_path, told):
    encode()
    before = (tmp_path / "m.json").read_bytes()
    path = payload(tmp_path / "cache", "latent")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9])
    if told:
        result = prep("verify", tmp_path / "m.json", "--json")
        assert result.code == 7 and result.json["repair"] == {}
    assert set(encode()["encoded"].values()) == {0}
    assert prep("verify", tmp_path / "m.json").code == 0 and (tmp_path / "m.json").read_bytes() == before


def test_two_shards_with_each_others_bytes_are_made_again(prep, photos, encode, tmp_path, tiny_model):
    """Every checksum of every row fits, so that no reader can notice: the digests do not."""
    encode()
    before = (tmp_path / "m.json").read_bytes()
    by_name = {}
    for path in sorted((tmp_path / "cache").glob("shards/*/*/latent/c.*")):
        by_name.setdefault(path.stat().st_size, []).append(path)
    one, other, *_ = next(paths for paths in by_name.values() if len(paths) > 1)
    spare = one.with_name("spare")
    one.rename(spare), other.rename(one), spare.rename(other)
    result = prep("verify", tmp_path / "m.json", "--json")
    assert result.code == 7 and {damage["row"] for damage in result.json["damaged"]} == {None}
    assert {damage["shard"] for damage in result.json["damaged"]} == {one.parts[-3], other.parts[-3]}
    assert encode()["encoded"] == {"latent": rows_in(one) + rows_in(other), "mask": 0, "text": 0}
    assert prep("verify", tmp_path / "m.json").code == 0 and (tmp_path / "m.json").read_bytes() == before


def test_training_on_a_damaged_row_stops_with_its_name_and_encode_mends_it(prep, train, encode, tmp_path):
    encode()
    for place in (100, 40000):
        for path in (tmp_path / "cache").glob("shards/*/*/hidden/*"):
            if path.name != "zarr.json":
                flip(path, place)
    run = ("--steps", 8, "--device", "cpu", "--quiet", "--set", "sample.every=0", "--set", "validation.every=0")
    result = train("run", tmp_path / "m.json", "-o", tmp_path / "run", *run)
    assert result.code == 7, result.err
    assert "does not match" in result.err or "do not match" in result.err
    assert "hint: prep" in result.err
    prep("verify", tmp_path / "m.json")
    assert encode()["encoded"]["text"] == 2
    assert train("run", tmp_path / "m.json", "-o", tmp_path / "run2", *run).code == 0


def test_a_damaged_table_is_named_and_written_again(prep, encode, tmp_path):
    encode()
    digest = read_manifest(tmp_path / "m.json").document["tables"]["samples"]
    table = tmp_path / "cache" / "tables" / digest[:2] / f"{digest}.arrow"
    flip(table, 700)
    result = prep("inspect", tmp_path / "m.json")
    assert result.code == 7 and f"table {digest} is damaged" in result.err
    encode()
    assert prep("inspect", tmp_path / "m.json").code == 0


def test_a_cache_that_is_not_there(prep, encode, tmp_path):
    encode()
    shutil.rmtree(tmp_path / "cache")
    result = prep("inspect", tmp_path / "m.json")
    assert result.code == 7 and "cache, does not exist" in result.err and "prep encode" in result.err


def commits_of(cache: Path, field: str) -> list[Path]:
    found = {path: json.loads(path.read_bytes()) for path in cache.glob("commits/*/*.json")}
    return [path for path, commit in found.items() if commit["field"] == field and commit["shard"]]


def spoil_commit(path: Path) -> None:
    flip(path, 30)


def halve_commit(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("spoil", [spoil_commit, halve_commit, Path.unlink])
def test_a_damaged_commit_costs_no_encoding(prep, encode, tmp_path, spoil):
    encode()
    before, shards = (tmp_path / "m.json").read_bytes(), sorted(tmp_path.glob("cache/shards/*/*"))
    lost = commits_of(tmp_path / "cache", "latent")
    for path in lost:
        spoil(path)
    if spoil is not Path.unlink:
        prep("verify", tmp_path / "m.json")
    assert set(encode()["encoded"].values()) == {0}
    assert (tmp_path / "m.json").read_bytes() == before and sorted(tmp_path.glob("cache/shards/*/*")) == shards
    assert prep("verify", tmp_path / "m.json").code == 0
    assert sorted(commits_of(tmp_path / "cache", "latent")) == sorted(lost)  # the same tasks have sound ones again
    assert set(encode()["encoded"].values()) == {0}


def test_a_damaged_commit_of_a_damaged_shard_costs_its_rows(prep, encode, tmp_path):
    """Nothing says any more that those are its rows: its digest does not fit."""
    encode()
    flip(payload(tmp_path / "cache", "hidden"), 100)
    for path in commits_of(tmp_path / "cache", "text"):
        flip(path, 30)
    prep("verify", tmp_path / "m.json")
    assert encode()["encoded"] == {"latent": 0, "mask": 0, "text": 1}
    assert prep("verify", tmp_path / "m.json").code == 0


def test_a_commit_that_points_to_nothing_costs_its_rows_and_goes(prep, encode, tmp_path):
    encode()
    before = (tmp_path / "m.json").read_bytes()
    commit = json.loads(commits_of(tmp_path / "cache", "mask")[0].read_bytes())
    shutil.rmtree(tmp_path / "cache" / "shards" / commit["shard"][:2] / commit["shard"])
    assert encode()["encoded"] == {"latent": 0, "mask": commit["rows"], "text": 0}
    assert prep("verify", tmp_path / "m.json").code == 0 and (tmp_path / "m.json").read_bytes() == before


def halve(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("kind", ["tables", "commits", "plans", "damaged", "lookup.arrow"])
def test_a_half_written_file_is_told_and_made_again(prep, encode, tmp_path, kind):
    """Whatever wrote it: ours never are. What is disposable is no fault."""
    encode()
    before, cache = (tmp_path / "m.json").read_bytes(), tmp_path / "cache"
    if kind in ("plans", "damaged"):
        (cache / kind).mkdir(exist_ok=True)
        shard = next(cache.glob("shards/*/*")).name
        (cache / kind / (shard + (".arrow" if kind == "plans" else ".json"))).write_bytes(b"half of someth")
    elif kind == "lookup.arrow":
        (cache / kind).touch()
        halve(cache / kind)
    else:
        for path in cache.glob(f"{kind}/*/*"):
            halve(path)
    result = prep("verify", tmp_path / "m.json", "--json")
    assert result.code == (7 if kind in ("tables", "commits") else 0)
    assert bool(result.json["notes"]) == (kind in ("commits", "plans", "damaged"))
    assert set(encode()["encoded"].values()) == {0}
    result = prep("verify", tmp_path / "m.json", "--json")
    assert result.code == 0 and (tmp_path / "m.json").read_bytes() == before
    assert [note for note in result.json["notes"] if not note.startswith("plan ")] == []


TRAIN = ("--steps", 8, "--device", "cpu", "--quiet", "--set", "sample.every=0", "--set", "validation.every=0")


@pytest.mark.parametrize(("spoil", "said"), [
    ("flip", r"shard \w{64}, array 'latent', row \d+: is damaged.*\(needed for '\d.png'"),
    ("index", r"shard \w{64}, array 'latent': .*damaged shard index"),
    ("half", r"shard \w{64} \(\d+ latent rows\) has \d+ bytes, expected \d+"),
    pytest.param("empty", r"shard \w{64} \(\d+ latent rows\) has \d+ bytes, expected \d+", marks=pytest.mark.slow),
    pytest.param("header", r"shard \w{64}, array 'latent': latent/zarr.json is not", marks=pytest.mark.slow),
    ("no shard", r"shard \w{64} \(\d+ latent rows\) is missing"),
])
def test_training_says_what_is_damaged_and_the_command_that_mends_it(prep, train, encode, tmp_path, spoil, said):
    encode()
    for path in (tmp_path / "cache").glob("shards/*/*/latent/c.*"):
        if spoil in ("flip", "index"):
            flip(path, 100 if spoil == "flip" else path.stat().st_size - 9)
        elif spoil == "header":
            flip(path.with_name("zarr.json"), 100)
        elif spoil == "no shard":
            shutil.rmtree(path.parent.parent)
        else:
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if spoil == "half" else b"")
    result = train("run", tmp_path / "m.json", "-o", tmp_path / "run", *TRAIN)
    assert result.code == 7 and re.search(said, result.err), result.err
    assert re.search("hint: prep (verify|encode).* --cache ", result.err), result.err
    assert result.err.count("error:") == 1
    if spoil != "flip":
        assert train("check", tmp_path / "m.json").code == 7
    assert prep("verify", tmp_path / "m.json").code == 7
    encode()
    assert prep("verify", tmp_path / "m.json").code == 0


def test_a_row_that_two_manifests_share_is_made_once(prep, encode, photos, tiny_model, tmp_path):
    encode()
    other = ("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "other.json",
             *SMALL[:-1], "none", "--json")
    assert set(prep(*other).json["encoded"].values()) == {0}
    flip(payload(tmp_path / "cache", "latent"), 100)
    for name in ("m.json", "other.json"):
        assert prep("verify", tmp_path / name, "--json").json["repair"] == {"latent": 1}
    assert encode()["encoded"] == {"latent": 1, "mask": 0, "text": 0}
    found = prep("verify", tmp_path / "other.json", "--json")
    assert found.code == 7 and found.json["repair"] == {}, "its shard was replaced by others, which have all its rows"
    assert {one["what"] for one in found.json["damaged"]} == {"the shard is missing"}
    assert set(prep(*other).json["encoded"].values()) == {0}
    assert [prep("verify", tmp_path / name).code for name in ("m.json", "other.json")] == [0, 0]


def test_what_the_disk_cannot_read_is_made_again(prep, encode, tmp_path, monkeypatch):
    """EIO for one row, from the reader, and until it is mended."""
    encode()
    sick = payload(tmp_path / "cache", "latent")
    inode, rows = sick.stat().st_ino, rows_in(sick)
    stride = (sick.stat().st_size - 4) // rows - 16

    def failing(descriptor, buffers, offset):
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if os.fstat(descriptor).st_ino == inode and offset <= stride + 40 < offset + size:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(descriptor, buffers, offset)

    read_on, blocks = verify.read_rest, verify._blocks
    monkeypatch.setattr(verify, "read_rest", lambda read_at, *given: read_on(failing, *given))
    monkeypatch.setattr(verify, "_blocks", lambda *given: blocks(*given[:-1], failing))
    with sick.open("rb"):  # its inode goes to no other file
        found = prep("verify", tmp_path / "m.json", "--json")
        assert found.code == 7 and found.json["repair"] == {"latent": 1}
        (damaged,) = found.json["damaged"]
        assert damaged["row"] == 1 and damaged["sample"] and "Input/output error" in damaged["what"]
        assert encode()["encoded"] == {"latent": 1, "mask": 0, "text": 0}
        assert prep("verify", tmp_path / "m.json").code == 0


@pytest.mark.parametrize("kind", ["commits", "tables", "plans", "damaged"])
def test_a_directory_in_the_place_of_a_file_is_mended(prep, encode, tmp_path, kind):
    """Every one of that kind; whatever is in it goes."""
    encode()
    whole = (tmp_path / "m.json").read_bytes()
    cache = open_cache(tmp_path / "cache", create=False)
    names = list(cache.shards()) if kind == "damaged" else list(cache.names(kind)) or ["ab" * 32]
    for name in names:
        path = cache.file(kind, name)
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)
        (path / "inner").write_text("something")
    assert encode()["encoded"] == {"latent": 0, "mask": 0, "text": 0}
    assert (tmp_path / "m.json").read_bytes() == whole
    assert prep("verify", tmp_path / "m.json").code == 0
    done = prep("gc", tmp_path / "cache", "--keep", tmp_path / "m.json", "--older-than", "0", "--yes")
    assert done.code == 0, done.err
    assert not list(cache.root.rglob("inner"))


def test_a_plan_that_is_a_directory_is_made_again(prep, encode, tmp_path, monkeypatch):
    encode()
    shutil.rmtree(next((tmp_path / "cache" / "shards").glob("*/*/mask")).parent)
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="interrupted"):
        patch.setattr("prep.encode.engines.local.run", stop)
        encode()
    (plan,) = (tmp_path / "cache" / "plans").iterdir()
    plan.unlink()
    plan.mkdir()
    assert encode()["encoded"]["mask"] > 0
    assert not plan.exists()


def stop(*_):
    raise KeyboardInterrupt
