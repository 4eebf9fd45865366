"""Every single bit of every file that a manifest depends on, flipped: verify finds it, and the reader in every row.

Ordinarily a sample of bits, with the whole of `prep verify`; all bits, a slow test, with the part of it that looks at
that file. What is disposable is not here: the look-up file, locks, plans and damage records.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from small_manifest import write_small

from prep.cache import shard_format
from prep.cache.reader import Reader
from prep.cache.shard_check import quick_check, verify_shard
from prep.errors import CacheError, ManifestError
from prep.fs import atomic
from prep.maintenance.documents import check_up
from prep.maintenance.verify import _damaged_tables, verify
from prep.manifest.document import read_manifest
from prep.manifest.opened import OpenedManifest, open_manifest

SAMPLE = 300
KINDS = ("manifest.json", "cache/latentry.json", "cache/tables", "cache/commits", "cache/shards")
LARGEST = 6000  # bytes of a file here, so that all bits can be tried


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flips")
    write_small(root)
    for path in every_file(root):
        path.chmod(0o644)
        assert path.stat().st_size < LARGEST
    return root


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of damage need not be on the disk here."""
    monkeypatch.setattr(atomic, "sync", lambda handle: handle.flush())
    monkeypatch.setattr(atomic, "sync_dir", lambda path: None)


def every_file(root: Path, kind: str = "") -> list[Path]:
    """The files that the manifest depends on, sorted."""
    found = (path for path in root.rglob("*") if path.is_file())
    names = KINDS if not kind else (kind,)
    return sorted(path for path in found if path.relative_to(root).as_posix().startswith(names))


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit is another within the block."""
    flip(path, bit)
    try:
        yield
    finally:
        flip(path, bit)


def flip(path: Path, bit: int) -> None:
    with path.open("r+b", buffering=0) as handle:
        handle.seek(bit // 8)
        byte = handle.read(1)[0] ^ 1 << bit % 8
        handle.seek(bit // 8)
        handle.write(bytes([byte]))


def verdict(root: Path) -> int:
    """The exit code of `prep verify`."""
    try:
        document = verify(open_manifest(read_manifest(root / "manifest.json")), jobs=1)
    except (CacheError, ManifestError) as error:
        return error.exit_code
    return 0 if document["ok"] else CacheError.exit_code


def test_the_cache_has_every_kind_of_file(home: Path) -> None:
    assert all(every_file(home, kind) for kind in KINDS)
    names = {path.name for path in every_file(home, "cache/shards")}
    assert names >= {"zarr.json", "c.0.0", "c.0.0.0", "c.0.0.0.0"} and verdict(home) == 0


@pytest.mark.slow
def test_a_sample_of_bits_is_found_by_prep_verify(home: Path) -> None:
    draw = random.Random(3)
    paths = every_file(home)
    for number in range(SAMPLE):
        path = paths[number % len(paths)]
        bit = draw.randrange(8 * path.stat().st_size)
        with flipped(path, bit):
            wanted = ManifestError.exit_code if path.name == "manifest.json" else CacheError.exit_code
            assert verdict(home) == wanted, f"bit {bit} of {path}"
    assert verdict(home) == 0


def look(root: Path, kind: str, path: Path, audit: OpenedManifest) -> None:
    """Raises `CacheError` or `ManifestError` for what is wrong with a file: the part of verify that reads it."""
    if kind == "manifest.json":
        read_manifest(root / "manifest.json")
    elif kind == "cache/latentry.json":
        open_manifest(audit.manifest)
    elif kind == "cache/tables":
        found = _damaged_tables(OpenedManifest(manifest=audit.manifest, cache=audit.cache))
        raise_first([one["what"] for one in found])
    elif kind == "cache/commits":
        raise_first(check_up(audit.cache, {}).damaged)
    else:
        raise_first([one.what for one in verify_shard(audit.cache, shard_of(path))])


def raise_first(found: list[str]) -> None:
    if found:
        raise CacheError(found[0])


def shard_of(path: Path) -> str:
    return next(part for part in path.parts if len(part) == 64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_found(home: Path, kind: str) -> None:
    tried, audit = 0, open_manifest(read_manifest(home / "manifest.json"))
    for path in every_file(home, kind):
        look(home, kind, path, audit)
        for bit in range(8 * path.stat().st_size):
            with flipped(path, bit), pytest.raises((CacheError, ManifestError)):
                look(home, kind, path, audit)
            tried += 1
    assert tried == 8 * sum(path.stat().st_size for path in every_file(home, kind)) > 900
    assert verdict(home) == 0


def arrays(root: Path) -> list[tuple[OpenedManifest, dict, Path]]:
    """Each shard with the data file of its array."""
    audit = open_manifest(read_manifest(root / "manifest.json"))
    return [(audit, shard, path) for shard in audit.shards for array in shard["shapes"]
            for path in (audit.cache.shard(shard["digest"]) / array).glob("c.*")]


def read_row(audit: OpenedManifest, shard: dict, array: str, row: int) -> None:
    reader = Reader(audit.cache)
    try:
        spec, _ = reader.array_info(shard["digest"], array)
        reader.read_into(np.empty(spec.row_bytes, np.uint8), shard["digest"], array, row)
    finally:
        reader.close()


def assert_found_when_read(audit: OpenedManifest, shard: dict, path: Path, bit: int) -> None:
    """A bit of a row, when that row is read; a bit of the shard index, when any row is. Verify names the same row."""
    array = path.parent.name
    size = path.stat().st_size - shard_format.CRC_BYTES - shard["rows"] * shard_format.ENTRY_BYTES
    row = bit // 8 // (size // shard["rows"])
    with flipped(path, bit):
        for each in range(shard["rows"]):
            if each == row or row >= shard["rows"]:
                with pytest.raises(CacheError, match=shard["digest"]) as caught:
                    read_row(audit, shard, array, each)
                assert row >= shard["rows"] or f"row {row}: is damaged" in caught.value.message
            else:
                read_row(audit, shard, array, each)
        (found,) = verify_shard(audit.cache, shard["digest"])
        assert found.row == (row if row < shard["rows"] else None) and found.array == array
        assert bool(quick_check(audit.cache,
                                shard["digest"])) == (row >= shard["rows"]), "quick sees indexes, and no rows"
    with suppress(OSError):
        atomic.remove(audit.cache.damaged(shard["digest"]))


def test_a_sample_of_bits_is_found_when_its_row_is_read(home: Path) -> None:
    draw = random.Random(4)
    every = arrays(home)
    for number in range(SAMPLE):
        audit, shard, path = every[number % len(every)]
        assert_found_when_read(audit, shard, path, draw.randrange(8 * path.stat().st_size))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_every_bit_is_found_when_its_row_is_read(home: Path, number: int) -> None:
    audit, shard, path = arrays(home)[number]
    check = partial(assert_found_when_read, audit, shard, path)
    for bit in range(8 * path.stat().st_size):
        check(bit)
    assert len(arrays(home)) == 4
