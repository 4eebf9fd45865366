"""A shard is whole, named by its bytes, the same bytes each time, and read-only; or it is not there."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prep.arrays import ArraySpec
from prep.cache import writer
from prep.cache.publish import retire_shard
from prep.cache.records import Shard
from prep.cache.store import Cache, open_cache
from prep.cache.writer import ShardWriter
from prep.fs import atomic
from prep.fs.tree import tree_digest

KEY = "ab" * 32


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_digest_is_that_of_the_files_on_disk(cache: Cache, shard: Shard) -> None:
    root = cache.shard(shard.digest)
    assert tree_digest(root) == shard.digest
    assert sum(len(data) for data in tree(root).values()) == shard.bytes
    assert sorted(tree(root)) == ["key/c.0.0", "key/zarr.json", "latent/c.0.0.0.0", "latent/zarr.json", "zarr.json"]


def test_golden(cache: Cache, put: Callable[..., Shard]) -> None:
    """The format's golden vector: when this moves, every cache in the world is stale."""
    specs = [
        ArraySpec(name="hidden", dtype="bfloat16", shape=(2, 3)),
        ArraySpec(name="pooled", dtype="float32", shape=(2,)),
        ArraySpec(name="mask", dtype="uint8", shape=()),
    ]
    rows = {f"{row:064x}": {spec.name: bytes([row]) * spec.row_bytes for spec in specs} for row in range(3)}
    digest = "f2aa8ff1b47457e936a8004325543c49379fc3477132af719b8dd276432cc545"
    assert put(cache, "text", specs, rows) == Shard(digest=digest, rows=3, bytes=2388)


def test_same_rows_same_bytes_and_nothing_left_in_staging(
    cache: Cache, shard: Shard, rows: Any, put: Callable[..., Shard], latent: ArraySpec, tmp_path: Path
) -> None:
    assert put(cache, "latent", [latent], rows) == shard  # over the one there
    other = open_cache(tmp_path / "other", create=True)
    assert put(other, "latent", [latent], rows) == shard
    assert tree(other.shard(shard.digest)) == tree(cache.shard(shard.digest))
    assert list((cache.root / "tmp").iterdir()) == []


@pytest.mark.parametrize("block", [1, 7, 48, 52, 64, 480])
def test_blocks_of_any_size_make_the_same_shard(
    cache: Cache, shard: Shard, rows: Any, put: Callable[..., Shard], latent: ArraySpec, tmp_path: Path, block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows smaller, larger and as large as a block; blocks digested by a thread, in turns, with syncs between them."""
    monkeypatch.setattr(writer, "BLOCK_BYTES", block)
    monkeypatch.setattr(writer, "BLOCKS", 2)
    monkeypatch.setattr(writer, "SYNC_BLOCKS", 3)
    assert put(open_cache(tmp_path / "other", create=True), "latent", [latent], rows) == shard


def test_leaving_while_blocks_are_digested_ends_the_thread(
    cache: Cache, latent: ArraySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 16)
    before = threading.active_count()
    with pytest.raises(OSError, match="no space"), ShardWriter(cache, "latent", [latent]) as shard:
        shard.add(KEY, {"latent": bytes(48)})
        monkeypatch.setattr(atomic, "write", full)
        shard.add("ac" * 32, {"latent": bytes(48)})
    assert threading.active_count() == before
    assert list((cache.root / "tmp").iterdir()) == []


def full(handle: Any, data: Any) -> None:
    raise OSError(28, "no space")


def test_a_damaged_shard_is_replaced_by_the_same_rows(
    cache: Cache, shard: Shard, rows: Any, put: Callable[..., Shard], latent: ArraySpec, edit: Callable[..., None]
) -> None:
    edit(cache.shard(shard.digest) / "latent" / "c.0.0.0.0", lambda data: data.__setitem__(3, data[3] ^ 1))
    put(cache, "latent", [latent], rows)
    assert tree_digest(cache.shard(shard.digest)) == shard.digest


def test_files_are_read_only_and_directories_are_not(cache: Cache, shard: Shard) -> None:
    for path in cache.shard(shard.digest).rglob("*"):
        assert bool(path.stat().st_mode & 0o222) == path.is_dir()


def test_bytes_are_as_good_as_arrays(
    cache: Cache, shard: Shard, rows: Any, put: Callable[..., Shard], latent: ArraySpec
) -> None:
    as_bytes = {key: {"latent": values["latent"].tobytes()} for key, values in rows.items()}
    as_views = {key: {"latent": memoryview(bytearray(values["latent"].tobytes()))} for key, values in rows.items()}
    as_strides = {key: {"latent": np.asfortranarray(values["latent"])} for key, values in rows.items()}
    for other in (as_bytes, as_views, as_strides):
        assert put(cache, "latent", [latent], other) == shard


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((4, 3, 2), np.float16), "array 'latent' is float16 [4, 3, 2], expected uint16 [4, 3, 2]"),
        (np.zeros((4, 2, 3), np.uint16), "array 'latent' is uint16 [4, 2, 3], expected uint16 [4, 3, 2]"),
        (bytes(47), "array 'latent' has 47 bytes, expected 48"),
    ],
)
def test_a_row_of_another_kind(cache: Cache, latent: ArraySpec, value: Any, message: str) -> None:
    with ShardWriter(cache, "latent", [latent]) as shard, pytest.raises(ValueError, match=re.escape(message)):
        shard.add(KEY, {"latent": value})
    assert shard.rows == 0


def test_keys_must_rise(cache: Cache, latent: ArraySpec) -> None:
    with ShardWriter(cache, "latent", [latent]) as shard:
        shard.add(KEY, {"latent": bytes(48)})
        with pytest.raises(ValueError, match=f"key {KEY} comes after {KEY}, expected sorted keys"):
            shard.add(KEY, {"latent": bytes(48)})


def test_arrays_must_be_those_of_the_shard(cache: Cache, latent: ArraySpec) -> None:
    with ShardWriter(cache, "latent", [latent]) as shard:
        with pytest.raises(ValueError, match=re.escape("row has ['mask'], expected ['latent']")):
            shard.add(KEY, {"mask": b""})
        with pytest.raises(ValueError, match="expected 64 lower-case hex digits"):
            shard.add("../x", {"latent": bytes(48)})


@pytest.mark.parametrize("name", ["key", "Latent", "a/b", "..", ""])
def test_names_of_arrays(cache: Cache, name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        ShardWriter(cache, "latent", [ArraySpec(name=name, dtype="uint8", shape=(1,))])


def test_arrays_are_named_once(cache: Cache, latent: ArraySpec) -> None:
    for arrays in ([], [latent, latent]):
        with pytest.raises(ValueError, match="expected at least one, each name once"):
            ShardWriter(cache, "latent", arrays)
    assert not list((cache.root).glob("tmp/*"))


def test_an_empty_shard_is_none(cache: Cache, latent: ArraySpec) -> None:
    with ShardWriter(cache, "latent", [latent]) as shard, pytest.raises(ValueError, match="0 rows, expected 1 to"):
        shard.finish()
    assert list((cache.root / "tmp").iterdir()) == []


def test_leaving_early_leaves_nothing(cache: Cache, latent: ArraySpec) -> None:
    with pytest.raises(KeyboardInterrupt), ShardWriter(cache, "latent", [latent]) as shard:
        shard.add(KEY, {"latent": bytes(48)})
        raise KeyboardInterrupt
    assert list((cache.root / "tmp").iterdir()) == []
    assert list(cache.shards()) == []


def test_processes_that_make_the_same_shard_at_once(
    cache: Cache, shard: Shard, rows: Any, put: Callable[..., Shard], latent: ArraySpec
) -> None:
    """Whoever comes second finds the place taken by the same bytes."""
    retire_shard(cache, shard.digest)
    start = threading.Barrier(4)
    made: list[Any] = []

    def race() -> None:
        start.wait()
        try:
            made.append(put(cache, "latent", [latent], rows))
        except BaseException as error:
            made.append(error)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [shard] * 4
    assert tree_digest(cache.shard(shard.digest)) == shard.digest
    assert list((cache.root / "tmp").iterdir()) == []
