"""Verify finds every change of a shard, says where when it can, and remembers; repair keeps what is good."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prep.arrays import ArraySpec
from prep.cache import damage, publish
from prep.cache import shard_check as verify
from prep.cache import shard_header as header
from prep.cache.ledger.ledger import empty_ledger, load_ledger, write_commit
from prep.cache.reader import Reader
from prep.cache.records import Shard, Task
from prep.cache.store import Cache, open_cache
from prep.fs import atomic, pread
from prep.fs.tree import tree_digest
from prep.maintenance import repair

A = "ab" * 32
DATA = "latent/c.0.0.0.0"
Edit = Callable[..., None]


def test_a_sound_shard(cache: Cache, shard: Shard) -> None:
    assert verify.verify_shard(cache, shard.digest) == []
    assert not cache.damaged(shard.digest).exists()


def test_damaged_rows_are_named_and_remembered(cache: Cache, shard: Shard, edit: Edit) -> None:
    for row in (1, 5):
        edit(cache.shard(shard.digest) / DATA, lambda data, at=row * 52: data.__setitem__(at, data[at] ^ 1))
    found = verify.verify_shard(cache, shard.digest)
    assert [(bad.field, bad.array, bad.row) for bad in found] == [("latent", "latent", 1), ("latent", "latent", 5)]
    assert set(damage.recorded(cache, shard.digest)) >= set(found)


def test_a_shard_made_sound_again_is_forgotten(cache: Cache, shard: Shard, edit: Edit) -> None:
    flip = lambda data: data.__setitem__(0, data[0] ^ 1)  # noqa: E731
    edit(cache.shard(shard.digest) / DATA, flip)
    assert verify.verify_shard(cache, shard.digest) != []
    edit(cache.shard(shard.digest) / DATA, flip)
    assert verify.verify_shard(cache, shard.digest) == []
    assert not cache.damaged(shard.digest).exists()


def test_a_missing_shard(cache: Cache) -> None:
    (found,) = verify.verify_shard(cache, A)
    assert (found.field, found.row, found.what) == (None, None, "the shard is missing")


@pytest.mark.parametrize("name", ["zarr.json", "key/zarr.json", "key/c.0.0", "latent/zarr.json", DATA])
def test_a_lost_file_costs_the_shard(cache: Cache, shard: Shard, name: str) -> None:
    (cache.shard(shard.digest) / name).unlink()
    (found,) = verify.verify_shard(cache, shard.digest)
    assert found.row is None
    assert "missing" in found.what or "No such file" in found.what


def test_a_file_too_many(cache: Cache, shard: Shard) -> None:
    (cache.shard(shard.digest) / "notes.txt").write_text("mine")
    (found,) = verify.verify_shard(cache, shard.digest)
    assert found.row is None
    assert found.what == (
        "the digest does not match, but every row's checksum does: files were added, removed or replaced"
    )


def test_rows_with_checksums_of_their_own_do_not_pass(
    cache: Cache, shard: Shard, draw: Any, put: Any, latent: ArraySpec, edit: Edit
) -> None:
    """A whole file of another shard, every checksum right: only the digest notices."""
    other = put(cache, "latent", [latent], draw([latent], 7, 1))
    edit(cache.shard(shard.digest) / DATA, lambda data: (cache.shard(other.digest) / DATA).read_bytes())
    (found,) = verify.verify_shard(cache, shard.digest)
    assert found.row is None


def test_another_number_of_rows(
    cache: Cache, shard: Shard, draw: Any, put: Any, latent: ArraySpec, edit: Edit
) -> None:
    other = put(cache, "latent", [latent], draw([latent], 8, 1))
    for name in (DATA, "latent/zarr.json"):
        edit(cache.shard(shard.digest) / name, lambda data, name=name: (cache.shard(other.digest) / name).read_bytes())
    (found,) = verify.verify_shard(cache, shard.digest)
    assert found.what == f"shard {shard.digest}, array 'latent': 8 rows, expected 7, one per key"


def test_what_cannot_be_read_is_told_and_not_remembered(
    cache: Cache, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(verify, "open_regular", refuse)
    (found,) = verify.verify_shard(cache, shard.digest)
    assert found.what == "cannot be read: [Errno 13] Permission denied"
    assert not cache.damaged(shard.digest).exists()


@pytest.fixture(scope="module")
def open_shard_files(tmp_path_factory: pytest.TempPathFactory, draw: Any, put: Any) -> tuple[Cache, Shard]:
    """A shard of two arrays whose files may be written."""
    cache = open_cache(tmp_path_factory.mktemp("verify") / "cache", create=True)
    hidden = ArraySpec(name="hidden", dtype="float16", shape=(2, 3))
    specs = [hidden, ArraySpec(name="pooled", dtype="uint8", shape=(3,))]
    shard = put(cache, "text", specs, draw(specs, 3))
    for path in cache.shard(shard.digest).rglob("*.*"):
        path.chmod(0o644)
    return cache, shard


@settings(max_examples=150, deadline=None)
@given(file=st.integers(0, 6), place=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_every_flipped_bit_of_every_file_is_found(
    open_shard_files: tuple[Cache, Shard], file: int, place: int, bit: int
) -> None:
    cache, shard = open_shard_files
    files = sorted(path for path in cache.shard(shard.digest).rglob("*") if path.is_file())
    assert len(files) == 7
    whole = files[file].read_bytes()
    changed = bytearray(whole)
    changed[place % len(whole)] ^= 1 << bit
    files[file].write_bytes(changed)
    try:
        assert verify.verify_shard(cache, shard.digest) != []
    finally:
        files[file].write_bytes(whole)
    assert verify.verify_shard(cache, shard.digest) == []


def committed(cache: Cache, shard: Shard, rows: Any) -> None:
    write_commit(cache, Task(key=A, field="latent", rows=tuple(rows)), shard, [], {})


def test_repair_copies_good_rows_and_retires_the_shard(cache: Cache, shard: Shard, rows: Any, edit: Edit) -> None:
    committed(cache, shard, rows)
    edit(cache.shard(shard.digest) / DATA, lambda data: data.__setitem__(2 * 52, data[2 * 52] ^ 1))
    verify.verify_shard(cache, shard.digest)
    assert repair.damaged_shards(cache) == [shard.digest]
    new = repair.salvage(cache, shard.digest)
    assert new is not None
    assert new.rows == 6
    assert list(cache.shards()) == [new.digest]
    assert repair.damaged_shards(cache) == []
    assert tree_digest(cache.shard(new.digest)) == new.digest
    places = load_ledger(cache).resolve(rows)
    lost = list(rows)[2]
    assert sorted(places) == sorted(set(rows) - {lost})
    out = bytearray(48)
    for key, ref in places.items():
        Reader(cache).read_into(memoryview(out), ref.shard, "latent", ref.row)
        assert out == rows[key]["latent"].tobytes()


def test_repair_looks_at_every_row_itself(cache: Cache, shard: Shard, rows: Any, edit: Edit) -> None:
    committed(cache, shard, rows)
    damage.record(cache, [damage.Damage(shard=shard.digest, field="latent", array="latent", row=0, what="bits")])
    edit(cache.shard(shard.digest) / DATA, lambda data: data.__setitem__(2 * 52, data[2 * 52] ^ 1))
    new = repair.salvage(cache, shard.digest)
    assert new is not None
    assert new.rows == 6, "row 2 went bad since, and row 0 is sound after all"


def lose_header(cache: Cache, digest: str, edit: Edit) -> None:
    (cache.shard(digest) / "zarr.json").unlink()


def flip_every_row(cache: Cache, digest: str, edit: Edit) -> None:
    edit(cache.shard(digest) / DATA, lambda data: bytes(byte ^ (place < 7 * 52) for place, byte in enumerate(data)))


def lose_all(cache: Cache, digest: str, edit: Edit) -> None:
    publish.retire_shard(cache, digest)


def swap_rows(cache: Cache, digest: str, edit: Edit) -> None:
    """Every checksum fits, and no row belongs to its key any more."""
    edit(cache.shard(digest) / DATA, lambda data: bytes(data[52:104] + data[:52] + data[104:]))


def swap_rows_and_spoil_the_index(cache: Cache, digest: str, edit: Edit) -> None:
    swap_rows(cache, digest, edit)
    edit(cache.shard(digest) / DATA, lambda data: data.__setitem__(-1, data[-1] ^ 1))


@pytest.mark.parametrize("harm", [lose_header, flip_every_row, lose_all, swap_rows, swap_rows_and_spoil_the_index])
def test_nothing_to_save(cache: Cache, shard: Shard, rows: Any, edit: Edit, harm: Any) -> None:
    committed(cache, shard, rows)
    harm(cache, shard.digest, edit)
    assert repair.salvage(cache, shard.digest) is None
    assert list(cache.shards()) == []
    assert list(cache.names("commits")) == []
    assert list((cache.root / "tmp").iterdir()) == []


def condemn(cache: Cache, digest: str, edit: Edit) -> None:
    damage.record(cache, [damage.Damage(shard=digest, field=None, array=None, row=None, what="gone")])


def spoil_record(cache: Cache, digest: str, edit: Edit) -> None:
    condemn(cache, digest, edit)
    cache.damaged(digest).write_bytes(b"{")


def spoil_index(cache: Cache, digest: str, edit: Edit) -> None:
    edit(cache.shard(digest) / DATA, lambda data: data.__setitem__(-20, data[-20] ^ 1))


def flip_a_row(cache: Cache, digest: str, edit: Edit) -> None:
    edit(cache.shard(digest) / DATA, lambda data: data.__setitem__(60, data[60] ^ 1))


def lose_index(cache: Cache, digest: str, edit: Edit) -> None:
    edit(cache.shard(digest) / DATA, lambda data: bytes(data[:-50]))


def add_to_the_end(cache: Cache, digest: str, edit: Edit) -> None:
    edit(cache.shard(digest) / DATA, lambda data: bytes(data) + b"more")


@pytest.mark.parametrize("harm", [condemn, spoil_record, spoil_index, lose_index, add_to_the_end])
def test_nothing_is_lost(cache: Cache, shard: Shard, rows: Any, edit: Edit, harm: Any) -> None:
    """The shard is whole, or is made so from what it has: it stays, with its commit."""
    committed(cache, shard, rows)
    harm(cache, shard.digest, edit)
    if harm not in (condemn, spoil_record):
        (found,) = verify.verify_shard(cache, shard.digest)
        assert (found.array, found.row) == ("latent", None)
    assert repair.salvage(cache, shard.digest) == shard
    assert verify.verify_shard(cache, shard.digest) == []
    assert repair.damaged_shards(cache) == []
    assert len(load_ledger(cache).resolve(rows)) == 7
    assert list((cache.root / "tmp").iterdir()) == []
    assert (cache.shard(shard.digest) / DATA).stat().st_mode & 0o222 == 0 or harm in (condemn, spoil_record)


def test_without_preadv_and_fadvise(cache: Cache, shard: Shard, monkeypatch: pytest.MonkeyPatch, edit: Edit) -> None:
    monkeypatch.setattr(verify, "SEQUENTIAL", pread.no_reading_through)
    ticks: list[int] = []
    assert verify.verify_shard(cache, shard.digest, tick=ticks.append, read_at=pread.plain_read) == []
    assert sum(ticks) == shard.bytes
    edit(cache.shard(shard.digest) / DATA, lambda data: data.__setitem__(52, data[52] ^ 1))
    (found,) = verify.verify_shard(cache, shard.digest, read_at=pread.plain_read)
    assert found.row == 1


def test_files_of_many_blocks(cache: Cache, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (1, 7, 480, 481):
        monkeypatch.setattr(verify, "BLOCK", block)
        ticks: list[int] = []
        assert verify.verify_shard(cache, shard.digest, tick=ticks.append) == []
        assert sum(ticks) == shard.bytes and max(ticks) <= max(block, 52), "at least a whole row"


@pytest.mark.parametrize("case", ["link", "pipe", "file for a shard"])
def test_what_is_no_plain_file_is_damage(cache: Cache, shard: Shard, case: str) -> None:
    """And nothing waits for it, or follows it."""
    path = cache.shard(shard.digest) / DATA
    if case == "file for a shard":
        shutil.rmtree(cache.shard(shard.digest))
        cache.shard(shard.digest).write_bytes(b"")
    else:
        path.rename(cache.root / "elsewhere")
        path.symlink_to(cache.root / "elsewhere") if case == "link" else os.mkfifo(path)
    (found,) = verify.verify_shard(cache, shard.digest)
    assert found.row is None and not found.transient
    assert "expected a plain file" in found.what or "expected a directory" in found.what
    (found,) = verify.quick_check(cache, shard.digest)
    assert not found.transient


def test_a_crash_while_an_index_is_written_anew_loses_nothing(
    cache: Cache, shard: Shard, rows: Any, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(cache, shard, rows)
    spoil_index(cache, shard.digest, edit)
    verify.verify_shard(cache, shard.digest)
    for primitive in ("write", "sync", "rename", "sync_dir"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(atomic, primitive, interrupt)
            repair.salvage(cache, shard.digest)
        assert cache.shard(shard.digest).is_dir()
    assert repair.salvage(cache, shard.digest) == shard
    assert verify.verify_shard(cache, shard.digest) == [] and len(load_ledger(cache).resolve(rows)) == 7


def interrupt(*given: Any, **named: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("harm", [flip_a_row, spoil_index])
def test_a_full_disk_loses_no_row(
    cache: Cache, shard: Shard, rows: Any, edit: Edit, monkeypatch: pytest.MonkeyPatch, harm: Any
) -> None:
    committed(cache, shard, rows)
    harm(cache, shard.digest, edit)
    verify.verify_shard(cache, shard.digest)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(atomic, "write", full)
        repair.salvage(cache, shard.digest)
    assert repair.damaged_shards(cache) == [shard.digest] and cache.commit(A).exists()
    new = repair.salvage(cache, shard.digest)
    assert new is not None and new.rows == (7 if harm is spoil_index else 6)


def full(handle: Any, data: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", handle.name)


@pytest.mark.parametrize(("module", "name"), [(verify, "open_regular"), (header, "entries")])
def test_a_shard_that_cannot_be_read_now_stays(
    cache: Cache, shard: Shard, rows: Any, edit: Edit, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """As does its record, so that it is looked at again."""
    committed(cache, shard, rows)
    condemn(cache, shard.digest, edit)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, refuse)
        assert repair.salvage(cache, shard.digest) is None
    assert repair.damaged_shards(cache) == [shard.digest] and cache.commit(A).exists()
    assert repair.salvage(cache, shard.digest) == shard


def refuse(path: Any) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_adopted(cache: Cache, shard: Shard, rows: Any) -> None:
    """A shard without a commit, where its rows are wanted; not again, and not for rows that it does not have."""
    assert repair.adopt_orphans(cache, load_ledger(cache), ["ab" * 32]) == []
    assert repair.adopt_orphans(cache, load_ledger(cache), [next(iter(rows))]) == [shard]
    assert len(load_ledger(cache).resolve(rows)) == 7
    assert repair.adopt_orphans(cache, load_ledger(cache), list(rows)) == []
    assert repair.adopt_orphans(cache, empty_ledger(), list(rows)) == [], "another process committed it meanwhile"


def test_wanted_keys_are_sorted_once_for_all_shards_without_a_commit(
    cache: Cache, draw: Any, put: Any, latent: ArraySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each: thousands of shards and millions of keys would take an hour. What is verified is told in bytes."""
    shards = [put(cache, "latent", [latent], draw([latent], 3, seed)) for seed in range(4)]
    wanted = {key for seed in (0, 1, 9) for key in draw([latent], 3, seed)}
    sorts, told, ticked = list[int](), list[Any](), list[int]()
    ledger, argsort = empty_ledger(), np.argsort
    monkeypatch.setattr(np, "argsort", lambda keys, **how: (sorts.append(len(keys)), argsort(keys, **how))[1])
    monkeypatch.setattr(np, "isin", refuse)

    def progress(title: str, total: Any, unit: str) -> Any:
        told.append((title, total, unit))
        return nullcontext(ticked.append)

    adopted = repair.adopt_orphans(cache, ledger, wanted, progress)
    assert sorted(one.digest for one in adopted) == sorted(one.digest for one in shards[:2]) and sorts == [9]
    assert told == [("looking for rows without a commit", None, ""),
                    ("verifying", sum(one.bytes for one in shards[:2]), "bytes")]
    assert sum(ticked) == told[1][1]


@pytest.mark.parametrize("harm", [flip_every_row, lose_header, swap_rows, spoil_index])
def test_no_damaged_shard_is_adopted(cache: Cache, shard: Shard, rows: Any, edit: Edit, harm: Any) -> None:
    harm(cache, shard.digest, edit)
    assert repair.adopt_orphans(cache, load_ledger(cache), list(rows)) == []
    assert list(cache.names("commits")) == []


def test_suspects_are_looked_into(
    cache: Cache, shard: Shard, rows: Any, draw: Any, put: Any, latent: ArraySpec
) -> None:
    """A commit that says something else of a sound shard goes, and the shard is found again; so does a damaged one."""
    lying = Shard(digest=shard.digest, rows=shard.rows, bytes=shard.bytes + 1)
    committed(cache, lying, rows)
    second = put(cache, "latent", [latent], draw([latent], 3, 5))
    write_commit(cache, Task(key="cd" * 32, field="latent", rows=()), second, [], {})
    write_commit(cache, Task(key="ef" * 32, field="latent", rows=()), None, [], {})
    assert repair.incomplete_commits(cache, load_ledger(cache)) == [A]
    repair.repair_commits(cache, [A, "cd" * 32, "ef" * 32, "12" * 32])
    assert list(cache.names("commits")) == ["cd" * 32, "ef" * 32], "nobody's doubt harms a sound commit"
    assert {one.digest for one in repair.adopt_orphans(cache, load_ledger(cache), list(rows))} == {shard.digest}


# ---- values that are not finite --------------------------------------------------------------------------------------

INFINITE = {"bfloat16": (0x7F80, 0xFF80, 0x7FC0, 0x7F81), "float16": (0x7C00, 0xFC00, 0x7E00, 0xFFFF),
            "float32": (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF)}


def spoiled(cache: Cache, put: Any, draw: Any, dtype: Any, bits: int, row: int = 4) -> tuple[Shard, dict[str, Any]]:
    """A sealed shard of seven rows, with one value of one row replaced before it was written."""
    spec = ArraySpec(name="latent", dtype=dtype, shape=(4, 3, 2))
    rows = draw([spec], 7)
    value = rows[list(rows)[row]]["latent"].view(verify.FLOATS[dtype][0])
    value[3, 2, 1] = bits
    return put(cache, "latent", [spec], rows), rows


@pytest.mark.parametrize(("dtype", "bits"), [(dtype, bits) for dtype, every in INFINITE.items() for bits in every])
@pytest.mark.parametrize("row", [0, 6])
def test_a_row_that_is_not_finite_is_named(
    cache: Cache, put: Any, draw: Any, dtype: Any, bits: int, row: int
) -> None:
    """Though every digest and checksum fits: an encoder of another program may have stored it."""
    shard, _ = spoiled(cache, put, draw, dtype, bits, row)
    (found,) = verify.verify_shard(cache, shard.digest)
    assert (found.array, found.row, found.what) == ("latent", row, "has values that are not finite (NaN or infinity)")
    assert damage.recorded(cache, shard.digest) == (found,)


@pytest.mark.parametrize("block", [1, 52, 60, 200, 1 << 20])
@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_blocks_and_short_reads_hide_no_value(
    cache: Cache, put: Any, draw: Any, monkeypatch: pytest.MonkeyPatch, block: int, most: int
) -> None:
    def little(descriptor: int, buffers: list[Any], offset: int) -> int:
        return pread.plain_read(descriptor, [buffers[0][:most]], offset)

    monkeypatch.setattr(verify, "BLOCK", block)
    shard, _ = spoiled(cache, put, draw, "bfloat16", 0x7F80)
    sound = put(cache, "latent", [ArraySpec(name="latent", dtype="bfloat16", shape=(4, 3, 2))], draw(
        [ArraySpec(name="latent", dtype="bfloat16", shape=(4, 3, 2))], 7, 1))
    (found,) = verify.verify_shard(cache, shard.digest, read_at=little)
    assert found.row == 4
    ticks: list[int] = []
    assert verify.verify_shard(cache, sound.digest, read_at=little, tick=ticks.append) == []
    assert sum(ticks) == sound.bytes


def test_repair_drops_rows_that_are_not_finite_and_keeps_the_others(cache: Cache, put: Any, draw: Any) -> None:
    shard, rows = spoiled(cache, put, draw, "bfloat16", 0x7FC0)
    committed(cache, shard, rows)
    verify.verify_shard(cache, shard.digest)
    new = repair.salvage(cache, shard.digest)
    assert new is not None and new.rows == 6
    assert set(rows) - set(load_ledger(cache).resolve(rows)) == {list(rows)[4]}
    assert verify.verify_shard(cache, new.digest) == []


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_finite_is_what_it_is_to_numpy(values: list[float]) -> None:
    single = np.array(values, "<f4")
    bits = single.view("<u4")
    upper = ((bits >> 16) << 16).view("<f4")  # what bfloat16 has of it
    with np.errstate(over="ignore"):
        half = single.astype("<f2")
    assert verify.is_finite(single.view(np.uint8), "float32") == bool(np.isfinite(single).all())
    assert verify.is_finite(half.view(np.uint8), "float16") == bool(np.isfinite(half).all())
    assert verify.is_finite((bits >> 16).astype("<u2").view(np.uint8), "bfloat16") == bool(np.isfinite(upper).all())
    assert verify.is_finite(bits.view(np.uint8), "uint8")
