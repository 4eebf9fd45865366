"""Rows are right, or a message names shard, array and row; whatever happens to the files, and on any system."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prep.arrays import ArraySpec
from prep.cache import damage, shard_format
from prep.cache.damage import UnrecordedDamage
from prep.cache.reader import Reader, RowTargets
from prep.cache.records import RowRef, Shard
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.fs import pread
from prep.fs.pread import no_advice, plain_read

Edit = Callable[..., None]
DATA = "latent/c.0.0.0.0"


def read_all(reader: Reader, shard: Shard) -> bytes:
    spec, rows = reader.array_info(shard.digest, "latent")
    out = np.empty((rows, spec.row_bytes), np.uint8)
    reader.read_batch(out, "latent", [RowRef(shard=shard.digest, row=row) for row in range(rows)])
    return out.tobytes()


def wanted(rows: Any) -> bytes:
    return b"".join(values["latent"].tobytes() for values in rows.values())


@pytest.mark.parametrize("options", [{}, {"read_at": plain_read, "advise": no_advice}, {"check": False}])
def test_every_row(cache: Cache, shard: Shard, rows: Any, latent: ArraySpec, options: Any) -> None:
    reader = Reader(cache, **options)
    assert reader.array_info(shard.digest, "latent") == (latent, 7)
    assert read_all(reader, shard) == wanted(rows)
    out = bytearray(latent.row_bytes)
    for row, values in enumerate(rows.values()):
        reader.read_into(memoryview(out), shard.digest, "latent", row)
        assert out == values["latent"].tobytes()
    reader.advise("latent", [RowRef(shard=shard.digest, row=row) for row in range(7)])
    assert reader.keys(shard.digest).tobytes() == bytes.fromhex("".join(rows))


def test_rows_go_straight_into_a_slice_of_a_batch(cache: Cache, shard: Shard, rows: Any, latent: ArraySpec) -> None:
    ring = np.full((3, 2, *latent.shape), 9, np.uint16)
    Reader(cache).read_batch(
        ring[1].reshape(2, -1).view(np.uint8), "latent", [RowRef(shard=shard.digest, row=row) for row in (6, 0)]
    )
    values = [row["latent"] for row in rows.values()]
    assert np.array_equal(ring[1], np.stack([values[6], values[0]]))
    assert (ring[[0, 2]] == 9).all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.empty((1, 47), np.uint8), "out has rows of 47 bytes, array 'latent' has 48"),
        (np.empty((1, 24), np.uint16), r"out is uint16 \[1, 24\], expected uint8 \[B, row_bytes\], rows contiguous"),
        (np.empty(48, np.uint8), r"out is uint8 \[48\], expected uint8 \[B, row_bytes\], rows contiguous"),
        (np.empty((1, 96), np.uint8)[:, ::2], r"out is uint8 \[1, 48\], expected uint8 \[B, row_bytes\], rows contig"),
    ],
)
def test_buffers_that_do_not_fit(cache: Cache, shard: Shard, out: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reader(cache).read_batch(out, "latent", [RowRef(shard=shard.digest, row=0)])


def test_a_batch_from_several_shards_and_into_some_of_its_rows(
    cache: Cache, draw: Any, put: Any, latent: ArraySpec
) -> None:
    """Rows land where they were asked for, whatever order they are read in; buffers are split once."""
    drawn = [draw([latent], 5, seed) for seed in range(3)]
    shards = [put(cache, "latent", [latent], rows) for rows in drawn]
    places = [(2, 4), (0, 1), (1, 0), (2, 0), (0, 3), (1, 1), (0, 1)]
    refs = [RowRef(shard=shards[shard].digest, row=row) for shard, row in places]
    out = np.full((len(refs), latent.row_bytes), 9, np.uint8)
    targets = RowTargets(out)
    reader = Reader(cache)
    wanted = [list(drawn[shard].values())[row]["latent"].tobytes() for shard, row in places]
    for _ in range(2):
        reader.read_batch(targets, "latent", refs)
        assert [row.tobytes() for row in out] == wanted
    out[:] = 9
    reader.read_batch(targets.only([5, 1]), "latent", [refs[0], refs[2]])
    assert (out[5].tobytes(), out[1].tobytes()) == (wanted[0], wanted[2])
    assert (out[[0, 2, 3, 4, 6]] == 9).all()


@pytest.mark.parametrize("at_once", [0.0, 3600.0], ids=["with threads", "one by one"])
def test_opening_many_at_once(cache: Cache, draw: Any, put: Any, latent: ArraySpec, edit: Edit,
                              monkeypatch: pytest.MonkeyPatch, at_once: float) -> None:
    """In their order, few files open at the end, and the first fault in that order is the one that is raised."""
    monkeypatch.setattr("prep.cache.reader.AT_ONCE", at_once)
    shards = [put(cache, "latent", [latent], draw([latent], 2 + seed, seed)) for seed in range(12)]
    places = [(shard.digest, "latent") for shard in shards]
    gc.collect()
    before = descriptors()
    reader = Reader(cache, open_arrays=3)
    assert reader.open_all(places) == [(latent, 2 + seed) for seed in range(12)]
    assert descriptors() <= before + 3
    assert Reader(cache).open_all([]) == []
    for bad in (3, 7):
        edit(cache.shard(shards[bad].digest) / DATA, lambda data: bytes(data[:-1]))
    with pytest.raises(CacheError, match=f"shard {shards[3].digest}, array 'latent': .* bytes, expected"):
        Reader(cache).open_all(places, jobs=4)
    assert all(damage.recorded(cache, shards[bad].digest) for bad in (3, 7))


@pytest.mark.skipif(sys.platform == "win32", reason="limits as POSIX has them")
def test_a_process_that_may_open_few_files(cache: Cache, draw: Any, put: Any, latent: ArraySpec) -> None:
    """The reader closes its files when there are no more to be had, and keeps fewer open from then on."""
    import resource

    rows = [draw([latent], 1, seed) for seed in range(40)]
    shards = [put(cache, "latent", [latent], one) for one in rows]
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_open() + 12, limits[1]))
    try:
        reader = Reader(cache, open_arrays=192)
        out = np.empty(latent.row_bytes, np.uint8)
        for shard, values in zip(shards, rows, strict=True):
            reader.read_into(out, shard.digest, "latent", 0)
            assert out.tobytes() == wanted(values)
        reader.close()
        taken = [os.dup(0) for _ in range(files_left())]
        try:
            with pytest.raises(CacheError, match="Too many open files") as caught:
                reader.read_into(out, shards[0].digest, "latent", 0)
            assert caught.value.hint.startswith("let the process open more files: ulimit -n 1024")
        finally:
            for descriptor in taken:
                os.close(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert damage.recorded(cache, shards[0].digest) == ()


def files_open() -> int:
    """The largest number of an open file."""
    return max(int(path.name) for path in Path("/dev/fd").iterdir())


def files_left() -> int:
    """How many files this process may still open."""
    opened: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.dup(0))
    for descriptor in opened:
        os.close(descriptor)
    return len(opened)


def test_damage_that_cannot_be_recorded_is_said_with_what_repairs_it(
    cache: Cache, shard: Shard, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad row, and a bad index: as in a cache on a read-only mount."""

    def read_only(*given: Any, **named: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    out = np.empty(48, np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(Cache, "write", read_only)
        for place in (0, -5):
            edit(cache.shard(shard.digest) / DATA, lambda data, at=place: data.__setitem__(at, data[at] ^ 1))
            with pytest.raises(UnrecordedDamage) as caught:
                Reader(cache).read_into(out, shard.digest, "latent", 0)
            assert caught.value.exit_code == 7 and "as it was first run, with --recheck" in caught.value.hint
    with pytest.raises(CacheError) as recorded:
        Reader(cache).read_into(out, shard.digest, "latent", 0)
    assert not isinstance(recorded.value, UnrecordedDamage) and "--recheck" not in recorded.value.hint


def test_few_files_are_kept_open_where_few_are_allowed() -> None:
    assert [pread.most_open(limit) for limit in (1, 64, 128, 256, 1024, 1 << 20)] == [1, 16, 64, 192, 192, 192]
    assert Reader(Cache(root=Path()))._limit == pread.most_open()


def test_buffers_of_another_number(cache: Cache, shard: Shard) -> None:
    with pytest.raises(ValueError, match="out has 2 rows, expected one for each of 1 places"):
        Reader(cache).read_batch(np.empty((2, 48), np.uint8), "latent", [RowRef(shard=shard.digest, row=0)])


@pytest.mark.parametrize("row", [-1, 7, 1 << 70])
def test_rows_that_are_not_there(cache: Cache, shard: Shard, row: int) -> None:
    with pytest.raises(CacheError, match=f"shard {shard.digest}, array 'latent', row {row}: there are 7 rows"):
        Reader(cache).read_into(np.empty(48, np.uint8), shard.digest, "latent", row)


def test_a_missing_shard(cache: Cache) -> None:
    with pytest.raises(CacheError, match=f"shard {'ab' * 32}, array 'latent': the shard is missing") as caught:
        Reader(cache).array_info("ab" * 32, "latent")
    assert "prep verify" in caught.value.hint
    assert "prep encode" in caught.value.hint


@pytest.mark.parametrize("name", ["..", "/etc", "a/b", ""])
def test_arrays_are_never_paths(cache: Cache, shard: Shard, name: str) -> None:
    with pytest.raises(CacheError, match=r"array is .*, expected lower-case letters, digits and underscores"):
        Reader(cache).array_info(shard.digest, name)
    assert not cache.damaged(shard.digest).exists()


def test_asking_for_an_array_that_no_shard_has_is_not_damage(cache: Cache, shard: Shard) -> None:
    with pytest.raises(CacheError, match=r"array 'hidden': zarr.json is missing"):
        Reader(cache).array_info(shard.digest, "hidden")
    assert not cache.damaged(shard.digest).exists()


@pytest.mark.parametrize("name", ["latent/zarr.json", DATA])
def test_a_deleted_file(cache: Cache, shard: Shard, name: str) -> None:
    (cache.shard(shard.digest) / name).unlink()
    with pytest.raises(CacheError, match=f"array 'latent': {Path(name).name} is missing"):
        Reader(cache).array_info(shard.digest, "latent")


@pytest.mark.parametrize("name", ["key/zarr.json", "key/c.0.0"])
def test_deleted_keys(cache: Cache, shard: Shard, name: str) -> None:
    (cache.shard(shard.digest) / name).unlink()
    with pytest.raises(CacheError, match=f"array 'key': {Path(name).name} is missing"):
        Reader(cache).keys(shard.digest)


def test_damaged_keys(cache: Cache, shard: Shard, edit: Edit) -> None:
    edit(cache.shard(shard.digest) / "key" / "c.0.0", lambda data: data.__setitem__(70, data[70] ^ 1))
    with pytest.raises(CacheError, match="array 'key': its bytes do not match their checksum"):
        Reader(cache).keys(shard.digest)


@pytest.mark.parametrize("size", [0, 1, 48, 479, 481, 5000])
def test_a_torn_or_swollen_file(cache: Cache, shard: Shard, edit: Edit, size: int) -> None:
    edit(cache.shard(shard.digest) / DATA, lambda data: bytes(data).ljust(size, b"\0")[:size])
    with pytest.raises(CacheError, match=f"c.0.0.0.0 has {size} bytes, expected 480 for 7 rows"):
        Reader(cache).array_info(shard.digest, "latent")


def test_a_file_torn_while_it_is_open(cache: Cache, shard: Shard, edit: Edit) -> None:
    reader = Reader(cache)
    reader.array_info(shard.digest, "latent")
    (cache.shard(shard.digest) / DATA).chmod(0o644)
    os.truncate(cache.shard(shard.digest) / DATA, 60)
    with pytest.raises(CacheError, match="row 1: ends after 8 of 52 bytes"):
        read_all(reader, shard)


def test_a_flipped_bit_is_named_and_remembered(cache: Cache, shard: Shard, edit: Edit) -> None:
    edit(cache.shard(shard.digest) / DATA, lambda data: data.__setitem__(3 * 52 + 7, data[3 * 52 + 7] ^ 1))
    message = f"shard {shard.digest}, array 'latent', row 3: is damaged: its bytes do not match their checksum"
    with pytest.raises(CacheError, match=message):
        read_all(Reader(cache), shard)
    (found,) = damage.recorded(cache, shard.digest)
    assert (found.array, found.row) == ("latent", 3)


def test_a_damaged_index_is_remembered_of_the_whole_shard(cache: Cache, shard: Shard, edit: Edit) -> None:
    edit(cache.shard(shard.digest) / DATA, lambda data: data.__setitem__(-9, data[-9] ^ 1))
    with pytest.raises(CacheError, match=r"array 'latent': latent/c.0.0.0.0 has a damaged shard index"):
        read_all(Reader(cache), shard)
    (found,) = damage.recorded(cache, shard.digest)
    assert found.row is None


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 479), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found(flipped: tuple[Cache, Shard, bytes], place: int, bit: int) -> None:
    cache, shard, whole = flipped
    damaged = bytearray(whole)
    damaged[place] ^= 1 << bit
    (cache.shard(shard.digest) / DATA).write_bytes(damaged)
    with pytest.raises(CacheError, match=r"damaged"):
        read_all(Reader(cache), shard)


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory, draw: Any, put: Any) -> tuple[Cache, Shard, bytes]:
    """A cache whose one data file is writable, and its sound bytes."""
    from prep.cache.store import open_cache

    cache = open_cache(tmp_path_factory.mktemp("flipped") / "cache", create=True)
    spec = ArraySpec(name="latent", dtype="bfloat16", shape=(4, 3, 2))
    shard = put(cache, "latent", [spec], draw([spec], 7))
    path = cache.shard(shard.digest) / DATA
    path.chmod(0o644)
    return cache, shard, path.read_bytes()


def test_unchecked_reads_let_flipped_bits_through(cache: Cache, shard: Shard, rows: Any, edit: Edit) -> None:
    edit(cache.shard(shard.digest) / DATA, lambda data: data.__setitem__(7, data[7] ^ 1))
    assert read_all(Reader(cache, check=False), shard) != wanted(rows)


def hostile(spec: ArraySpec, rows: int) -> Callable[[bytearray], bytes]:
    return lambda data: shard_format.array_document(spec, rows)


@pytest.mark.parametrize(
    ("spec", "rows", "message"),
    [
        (ArraySpec(name="latent", dtype="bfloat16", shape=(4, 3, 2)), 8, "has 480 bytes, expected 548 for 8 rows"),
        (ArraySpec(name="latent", dtype="float16", shape=(4, 3, 2)), 1 << 24, "has 480 bytes, expected"),
        (ArraySpec(name="latent", dtype="float32", shape=(1 << 20, 1 << 8, 1)), 1, "has 480 bytes, expected"),
        (ArraySpec(name="latent", dtype="uint8", shape=(1 << 29, 1 << 29, 1)), 1, "expected rows of at most"),
        (ArraySpec(name="latent", dtype="uint8", shape=(1, 1, 1)), 1 << 40, "expected 1 to 16777216 rows"),
    ],
)
def test_headers_that_promise_too_much(
    cache: Cache, shard: Shard, edit: Edit, spec: ArraySpec, rows: int, message: str
) -> None:
    """Nothing is allocated by what a header says: sizes of files decide."""
    edit(cache.shard(shard.digest) / "latent" / "zarr.json", hostile(spec, rows))
    with pytest.raises(CacheError, match=message):
        Reader(cache).array_info(shard.digest, "latent")


def test_a_header_of_a_gigabyte_is_not_read(cache: Cache, shard: Shard) -> None:
    path = cache.shard(shard.digest) / "latent" / "zarr.json"
    path.chmod(0o644)
    os.truncate(path, 1 << 30)  # a hole
    with pytest.raises(CacheError, match=r"zarr.json has more than 65536 bytes"):
        Reader(cache).array_info(shard.digest, "latent")


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_handles_are_bounded_and_closed(cache: Cache, draw: Any, put: Any, latent: ArraySpec) -> None:
    shards = [put(cache, "latent", [latent], draw([latent], 2, seed)) for seed in range(6)]
    gc.collect()
    before = descriptors()
    reader = Reader(cache, open_arrays=2)
    for shard in shards * 2:
        reader.array_info(shard.digest, "latent")
        assert descriptors() <= before + 2
    reader.close()
    assert descriptors() == before
    reader.array_info(shards[0].digest, "latent")


@pytest.mark.parametrize("options", [{}, {"read_at": plain_read}])
def test_threads_that_take_each_others_handle(
    cache: Cache, draw: Any, put: Any, latent: ArraySpec, options: Any
) -> None:
    """One open array for two shards and four threads: a handle is dropped while another thread still reads from it."""
    drawn = [draw([latent], 9, seed) for seed in range(2)]
    shards = [put(cache, "latent", [latent], rows) for rows in drawn]
    reader = Reader(cache, open_arrays=1, **options)
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(150):
                assert read_all(reader, shards[seed]) == wanted(drawn[seed])
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_disk_error_is_told_with_its_row(cache: Cache, shard: Shard) -> None:
    def broken(descriptor: int, buffers: list[Any], offset: int) -> int:
        raise OSError(5, "Input/output error")

    with pytest.raises(CacheError, match=re.escape(
            f"shard {shard.digest}, array 'latent', row 0: cannot be read: [Errno 5] Input/output error")):
        read_all(Reader(cache, read_at=broken), shard)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_nobody_may_write_is_read(cache: Cache, shard: Shard, rows: Any, edit: Edit) -> None:
    edit(cache.shard(shard.digest) / DATA, lambda data: data.__setitem__(7, data[7] ^ 1))
    cache.root.chmod(0o555)
    try:
        with pytest.raises(CacheError, match="row 0: is damaged"):
            read_all(Reader(cache), shard)
    finally:
        cache.root.chmod(0o755)


def test_short_reads_are_read_on(cache: Cache, shard: Shard, rows: Any) -> None:
    """A system may give less than it was asked for at any time; only nothing at all is the end of a file."""
    given = []

    def few(descriptor: int, buffers: Any, offset: int) -> int:
        given.append(os.preadv(descriptor, [memoryview(buffers[0]).cast("B")[:5]], offset))
        return given[-1]

    assert read_all(Reader(cache, read_at=few), shard) == wanted(rows)
    assert len(given) > 7 * 10 and not cache.damaged(shard.digest).exists()


@pytest.mark.parametrize(("number", "remembered"), [(errno.EIO, True), (errno.EACCES, False), (errno.ETIMEDOUT, False)])
def test_what_the_disk_lost_is_remembered_and_what_may_pass_is_not(
    cache: Cache, shard: Shard, number: int, remembered: bool
) -> None:
    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == 2 * 52:
            raise OSError(number, os.strerror(number))
        return os.preadv(descriptor, buffers, offset)

    with pytest.raises(CacheError, match=rf"array 'latent', row 2: cannot be read: .*{os.strerror(number)}"):
        read_all(Reader(cache, read_at=failing), shard)
    assert [found.row for found in damage.recorded(cache, shard.digest)] == [2] * remembered


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_an_index_that_cannot_be_read(
    cache: Cache, shard: Shard, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("prep.cache.reader.check_index", refuse)
    with pytest.raises(CacheError, match=f"array 'latent': .*{os.strerror(number)}"):
        Reader(cache).array_info(shard.digest, "latent")
    assert bool(damage.recorded(cache, shard.digest)) == (number == errno.EIO)
