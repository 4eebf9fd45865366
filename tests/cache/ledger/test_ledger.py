"""What the cache has: commits and shards agree, or the rows count as missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.arrays import ArraySpec
from prep.cache import damage, publish
from prep.cache.commits import read_commit
from prep.cache.damage import Damage
from prep.cache.ledger.columns import gather, packed
from prep.cache.ledger.inventory import Inventory
from prep.cache.ledger.ledger import _ledger, forget_rejects, is_finished, load_ledger, write_commit
from prep.cache.records import Reject, RowRef, Shard, Task
from prep.cache.store import Cache
from prep.digest import canonical, digest_bytes, with_checksum
from prep.errors import CacheError

A, B = "ab" * 32, "cd" * 32
PROVENANCE = {"host": "h", "device": "cpu", "versions": {"torch": "2"}, "milliseconds": 7}
Edit = Callable[..., None]


def task_of(rows: Any, key: str = A) -> Task:
    return Task(key=key, field="latent", rows=tuple(rows))


@pytest.fixture
def committed(cache: Cache, shard: Shard, rows: Any) -> Shard:
    """`shard`, with its commit."""
    assert write_commit(cache, task_of(rows), shard, [], PROVENANCE)
    return shard


def test_an_empty_cache(cache: Cache) -> None:
    empty = load_ledger(cache)
    assert empty.find(A) is None
    assert empty.rejected(A) is None
    assert not empty.has_commit(A)
    assert empty.resolve([A, B]) == {}
    assert empty.resolve([]) == {}


def test_committed_rows_are_found(cache: Cache, committed: Shard, rows: Any) -> None:
    loaded = load_ledger(cache)
    wanted = {key: RowRef(shard=committed.digest, row=row) for row, key in enumerate(rows)}
    assert loaded.resolve([*reversed(list(rows)), A]) == wanted
    assert loaded.find(next(iter(rows))) == RowRef(shard=committed.digest, row=0)
    assert loaded.find(A) is None
    assert loaded.has_commit(A)
    assert not loaded.has_commit(B)
    assert (loaded.shards, loaded.fields) == ((committed,), ("latent",))


def test_places_are_a_mapping_that_can_be_narrowed_and_counted_by_shard(cache: Cache, put: Any, latent: ArraySpec
                                                                        ) -> None:
    keys = sorted(digest_bytes(bytes([number])) for number in range(9))
    wanted: dict[str, RowRef] = {}
    for some in (keys[:6], keys[6:]):
        made = put(cache, "latent", [latent], {key: {"latent": key.encode()[:48]} for key in some})
        write_commit(cache, task_of(some, some[0]), made, [], {})
        wanted |= {key: RowRef(shard=made.digest, row=row) for row, key in enumerate(some)}
    found = load_ledger(cache).resolve([*keys, A, B])
    assert dict(found) == wanted and list(found) == keys and len(found) == 9
    assert keys[0] in found and A not in found and "ff" * 32 not in found and 7 not in found
    assert found.by_shard() == {wanted[keys[0]].shard: 6, wanted[keys[8]].shard: 3}
    few = found.only({keys[7], keys[1], A})
    assert dict(few) == {key: wanted[key] for key in (keys[1], keys[7])} and set(few.by_shard().values()) == {1}
    assert not found.only(()) and found.only(()).by_shard() == {}
    with pytest.raises(KeyError):
        found[A]


def test_keys_with_zeros_at_their_ends(cache: Cache, put: Any, latent: ArraySpec) -> None:
    """Keys are searched as NumPy byte strings, which drop trailing zeros when they are shown."""
    keys = ["00" * 32, "00" * 31 + "01", "01" + "00" * 31, "01" + "00" * 30 + "01", "ff" * 31 + "00"]
    made = put(cache, "latent", [latent], {key: {"latent": bytes(48)} for key in keys})
    reject = Reject(key=keys[2], code="x", detail="y")
    write_commit(cache, task_of(keys), made, [reject], {})
    loaded = load_ledger(cache)
    assert loaded.resolve(keys) == {key: RowRef(shard=made.digest, row=row) for row, key in enumerate(keys)}
    assert loaded.find("ff" * 32) is None
    assert loaded.find("01" + "00" * 29 + "0001") == loaded.find(keys[3])
    assert loaded.rejected(keys[2]) is None


def test_a_shard_without_a_commit_is_unknown(cache: Cache, shard: Shard, rows: Any) -> None:
    assert load_ledger(cache).resolve(rows) == {}


def lose_shard(cache: Cache, digest: str, edit: Edit) -> None:
    publish.retire_shard(cache, digest)


def tear_data(cache: Cache, digest: str, edit: Edit) -> None:
    edit(cache.shard(digest) / "latent" / "c.0.0.0.0", lambda data: data[:-1])


def lose_file(cache: Cache, digest: str, edit: Edit) -> None:
    (cache.shard(digest) / "latent" / "c.0.0.0.0").unlink()


def flip_key(cache: Cache, digest: str, edit: Edit) -> None:
    edit(cache.shard(digest) / "key" / "c.0.0", lambda data: data.__setitem__(0, data[0] ^ 1))


def condemn(cache: Cache, digest: str, edit: Edit) -> None:
    damage.record(cache, [Damage(shard=digest, field=None, array=None, row=None, what="gone")])


def flip_commit(cache: Cache, digest: str, edit: Edit) -> None:
    edit(cache.commit(A), lambda data: data.__setitem__(20, data[20] ^ 1))


def misname_commit(cache: Cache, digest: str, edit: Edit) -> None:
    document = {"format": "latentry/commit", "version": 1, "task": B, "field": "latent", "shard": digest, "rows": 7,
                "bytes": 1705, "rejects": []}
    edit(cache.commit(A), lambda data: canonical(with_checksum(document)))


def misspell_commit(cache: Cache, digest: str, edit: Edit) -> None:
    edit(cache.commit(A), lambda data: canonical(with_checksum({"format": "latentry/commit", "version": 1, "task": A})))


@pytest.mark.parametrize(
    "harm", [lose_shard, tear_data, lose_file, flip_key, condemn, flip_commit, misname_commit, misspell_commit]
)
def test_harm_counts_as_missing_and_the_task_can_be_done_again(
    cache: Cache, committed: Shard, rows: Any, put: Any, latent: ArraySpec, edit: Edit, harm: Any
) -> None:
    harm(cache, committed.digest, edit)
    assert load_ledger(cache).resolve(rows) == {}
    assert not load_ledger(cache).has_commit(A)
    assert not is_finished(cache, A)
    again = put(cache, "latent", [latent], rows)
    write_commit(cache, task_of(rows), again, [], PROVENANCE)
    assert len(load_ledger(cache).resolve(rows)) == 7
    assert load_ledger(cache).has_commit(A)


def test_damaged_rows_are_missing_and_the_others_are_not(cache: Cache, committed: Shard, rows: Any) -> None:
    damage.record(cache, [Damage(shard=committed.digest, field="latent", array="latent", row=2, what="bits")])
    found = load_ledger(cache).resolve(rows)
    assert sorted(ref.row for ref in found.values()) == [0, 1, 3, 4, 5, 6]
    assert not load_ledger(cache).has_commit(A)


def test_a_finished_task_keeps_its_first_commit(cache: Cache, committed: Shard, rows: Any) -> None:
    first = cache.commit(A).read_bytes()
    assert not write_commit(cache, task_of(rows), committed, [], {"host": "another"})
    assert cache.commit(A).read_bytes() == first


def test_a_commit_holds_provenance_and_rejects(cache: Cache) -> None:
    reject = Reject(key=B, code="truncated", detail="ends early")
    write_commit(cache, task_of([B]), None, [reject], PROVENANCE)
    found = read_commit(cache, A)
    assert found is not None
    assert (found.task, found.field, found.shard, found.rejects) == (A, "latent", None, (reject,))
    assert found.provenance == PROVENANCE
    loaded = load_ledger(cache)
    assert loaded.has_commit(A)
    assert loaded.rejected(B) == reject


def test_a_row_made_after_all_is_rejected_no_more(cache: Cache, committed: Shard, rows: Any) -> None:
    key = next(iter(rows))
    write_commit(cache, task_of([key], B), None, [Reject(key=key, code="x", detail="y")], {})
    assert load_ledger(cache).rejected(key) is None


def test_another_version_is_an_error(cache: Cache, committed: Shard, edit: Edit) -> None:
    edit(cache.commit(A), lambda data: canonical(with_checksum({"format": "latentry/commit", "version": 2})))
    with pytest.raises(CacheError, match=r"is 'latentry/commit' version 2, expected 'latentry/commit' version 1"):
        load_ledger(cache)


def test_the_shard_with_more_wanted_rows_is_taken_then_the_smaller_digest(
    cache: Cache, draw: Any, put: Any, latent: ArraySpec
) -> None:
    rows = draw([latent], 6)
    keys = list(rows)
    few, many = keys[:3], keys[1:]
    parts = {name: put(cache, "latent", [latent], {key: rows[key] for key in part})
             for name, part in (("few", few), ("many", many))}
    write_commit(cache, task_of(few, A), parts["few"], [], {})
    write_commit(cache, task_of(many, B), parts["many"], [], {})
    loaded = load_ledger(cache)
    places = loaded.resolve(keys)
    assert [places[key].shard == parts["many"].digest for key in keys] == [False, True, True, True, True, True]
    assert loaded.resolve(keys[:3])[keys[1]].shard == parts["few"].digest
    smaller = min(part.digest for part in parts.values())
    assert {ref.shard for ref in loaded.resolve(keys[1:3]).values()} == {smaller}


@given(
    parts=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True), max_size=6),
    wanted=st.sets(st.integers(0, 40)),
)
def test_resolve_agrees_with_the_rule_said_plainly(parts: list[list[int]], wanted: set[int]) -> None:
    names = {number: digest_bytes(str(number).encode()) for number in range(41)}
    shards = [Shard(digest=f"{place:064x}", rows=len(part), bytes=1) for place, part in enumerate(parts)]
    ordered = [sorted(names[number] for number in part) for part in parts]
    columns = [
        (place, np.array([bytes.fromhex(key) for key in part], "S32"), np.arange(len(part), dtype=np.int32))
        for place, part in enumerate(ordered)
    ]
    made = _ledger(Inventory(commits=(), shards=tuple((shard, "latent") for shard in shards),
                             counts=tuple(map(len, ordered)), columns=gather(columns)))
    keys = {names[number] for number in wanted}
    expected = {}
    for key in keys:
        holders = [place for place, part in enumerate(ordered) if key in part]
        if holders:
            best = min(holders, key=lambda place: (-len(keys & set(ordered[place])), place))
            expected[key] = RowRef(shard=shards[best].digest, row=ordered[best].index(key))
    assert made.resolve(keys) == expected
    places = made.locate(packed(names.values()))
    found = made.resolve(names.values())
    for name, shard, row in zip(names.values(), places.shard.tolist(), places.row.tolist(), strict=True):
        there = RowRef(shard=shards[shard].digest, row=row) if shard >= 0 else None
        assert found.get(name) == there


def rejects_of(cache: Cache, task: str) -> list[str]:
    found = read_commit(cache, task)
    return [] if found is None else [reject.key for reject in found.rejects]


def test_forgotten_rejects_leave_rows_and_other_rejects(cache: Cache, shard: Shard, rows: Any) -> None:
    kept, gone = Reject(key=A, code="x", detail="é"), Reject(key=B, code="y", detail="z")
    write_commit(cache, task_of(rows, A), shard, [kept, gone], PROVENANCE)
    write_commit(cache, task_of([B], B), None, [gone], PROVENANCE)
    only = digest_bytes(b"neither")
    write_commit(cache, task_of([A, B], only), None, [gone, kept], PROVENANCE)
    assert load_ledger(cache).rejected(B) == gone
    forget_rejects(cache, frozenset([B]))
    loaded = load_ledger(cache)
    assert (loaded.rejected(A), loaded.rejected(B)) == (kept, None)
    assert len(loaded.resolve(rows)) == 7
    assert list(cache.names("commits")) == sorted([A, only])
    assert rejects_of(cache, A) == rejects_of(cache, only) == [A]
    found = read_commit(cache, A)
    assert found is not None and (found.shard, found.provenance) == (shard, PROVENANCE)
    forget_rejects(cache, frozenset([A, B]))
    assert list(cache.names("commits")) == [A] and len(load_ledger(cache).resolve(rows)) == 7


def test_what_nobody_rejected_is_not_written(cache: Cache, committed: Shard) -> None:
    before = cache.commit(A).stat()
    forget_rejects(cache, frozenset([A, B]))
    assert cache.commit(A).stat() == before


def test_a_row_rejected_again_and_again_has_one_commit(cache: Cache, shard: Shard, rows: Any) -> None:
    write_commit(cache, task_of([*rows, B], A), shard, [Reject(key=B, code="x", detail="0")], PROVENANCE)
    for number in "123":
        forget_rejects(cache, frozenset([B]))
        assert load_ledger(cache).rejected(B) is None and not is_finished(cache, B)
        write_commit(cache, task_of([B], B), None, [Reject(key=B, code="x", detail=number)], PROVENANCE)
        assert load_ledger(cache).rejected(B) == Reject(key=B, code="x", detail=number)
        assert list(cache.names("commits")) == sorted([A, B])
