"""What keeps, moves and checks a cache does so with the references of its samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pictures import saved
from PIL import Image
from remote_rows import rows_of
from small_manifest import write_small

from prep.export.packed.pack import pack
from prep.export.packed.unpack import unpack
from prep.maintenance.compact import compact
from prep.maintenance.gc import collect_garbage
from prep.maintenance.verify import verify
from prep.manifest.describe import describe_samples
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.progress import silent

FILES = {"../control_1/a.png": saved(Image.new("RGB", (96, 96), "teal")),
         "../control_2/a.png": saved(Image.new("RGB", (60, 40), "olive"))}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A dataset in which a.png has two references."""
    return write_small(tmp_path / "home", references=FILES)


def packed(path: Path) -> Path:
    pack(path, path.parent / "it.tar")
    unpack(path.parent / "it.tar", path.parent / "there")
    return path.parent / "there" / "manifest.json"


def collected(path: Path) -> Path:
    said = collect_garbage(path.parent / "cache", [path], guard=0, older_than="0s", dry_run=False,
                           progress=silent)
    assert not said.as_json()["removed"]["shards"]
    return path


def joined(path: Path) -> Path:
    compact(path.parent / "cache", shard_bytes=1 << 28, dry_run=False, progress=silent)
    return path


def verified(path: Path) -> Path:
    assert verify(open_manifest(read_manifest(path)))["ok"]
    return path


@pytest.mark.parametrize("work", [verified, collected, joined, packed], ids=lambda work: work.__name__)
def test_references_stay(home, work):
    def references(path):
        (sample,) = describe_samples(open_manifest(read_manifest(path)), "a.png")["samples"]
        return sample["views"][0]["references"]

    before, rows = references(home), rows_of(home)
    assert [one["name"] for one in before] == [*FILES] and len({one["latent"]["key"] for one in before}) == 2
    after = work(home)
    assert references(after) == before and rows_of(after) == rows
    assert verify(open_manifest(read_manifest(after)))["ok"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_damaged_row_of_a_reference_is_named_by_its_sample(home, place):
    opened = open_manifest(read_manifest(home))
    (sample,) = describe_samples(opened, "a.png")["samples"]
    row = sample["views"][0]["references"][place]["latent"]
    folder = opened.cache.shard(row["shard"]) / "latent"
    (data,) = (path for path in folder.iterdir() if path.name != "zarr.json")
    whole = bytearray(data.read_bytes())
    whole[row["row"] * (4 * 4 * 6 * 2 + 4)] ^= 1  # bfloat16 [4, 4, 6], and its checksum
    data.chmod(0o600)
    data.write_bytes(whole)
    document = verify(open_manifest(read_manifest(home)))
    (damaged,) = document["damaged"]
    assert (damaged["row"], damaged["samples"], document["repair"]) == (row["row"], ["a.png"], {"latent": 1})


def test_a_row_of_another_reference_is_found_though_every_byte_is_sound(tmp_path):
    """The table says another picture than that whose latent the row is."""
    import small_manifest

    other = small_manifest.reference_of("x.png", saved(Image.new("RGB", (50, 40), "red")))
    real = small_manifest.reference_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_manifest, "reference_of", lambda name, data: replace(
            real(name, data), picture=other.picture))
        path = write_small(tmp_path, references=FILES)
    document = verify(open_manifest(read_manifest(path)))
    assert {tuple(one["samples"]) for one in document["damaged"]} == {("a.png",)} and len(document["damaged"]) == 2
