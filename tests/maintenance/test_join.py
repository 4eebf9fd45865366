"""Small shards become few: the same rows under the same keys, nothing twice, nothing left to do the second time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashes import Crashed, Disk, sound, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prep.arrays import ArraySpec
from prep.cache import damage
from prep.cache.commits import read_commit
from prep.cache.damage import Damage
from prep.cache.ledger.ledger import empty_ledger, load_ledger, write_commit
from prep.cache.reader import Reader
from prep.cache.records import Reject, Shard, Task
from prep.cache.store import Cache, open_cache
from prep.digest import digest_json
from prep.maintenance import join as compact
from prep.maintenance.join import LostRow, Part, join, plan_joins

SPEC = ArraySpec(name="latent", dtype="bfloat16", shape=(4, 3, 2))
WIDE = ArraySpec(name="latent", dtype="bfloat16", shape=(4, 2, 3))
POOLED = ArraySpec(name="pooled", dtype="float32", shape=(2,))
ROW = 48 + 4 + 16 + 32  # bytes of a row of SPEC in a shard
TEN = 4096 + 10 * ROW  # a shard of that size has ten rows
Rows = dict[str, dict[str, np.ndarray]]
Add = Callable[..., Shard]


@pytest.fixture
def add(put: Any) -> Add:
    """`add(cache, rows)`: a shard with its commit."""

    def go(cache: Cache, rows: Rows, specs: Any = (SPEC,), field: str = "latent", rejects: Any = ()) -> Shard:
        shard = put(cache, field, specs, rows)
        task = Task(key=digest_json({"field": field, "rows": list(rows)}), field=field, rows=tuple(rows))
        write_commit(cache, task, shard, rejects, {})
        return shard

    return go


def some(rows: Rows, *numbers: int) -> Rows:
    """Rows by their place in the order of keys."""
    keys = list(rows)
    return {keys[number]: rows[keys[number]] for number in sorted(numbers)}


def run(cache: Cache, shard_bytes: int = TEN) -> tuple[list[Shard], list[LostRow]]:
    """Everything that is to be joined, joined."""
    found = load_ledger(cache)
    rejects = compact.rejects_by_shard(cache)
    made, lost = [], []
    parts = plan_joins(cache, found, shard_bytes=shard_bytes)
    shunned = compact.unverifiable(cache, compact.sources_of(parts))
    for part in parts:
        said = [r for one in part.sources for r in rejects.get(one, ())]
        shard, missing = join(cache, cache, found, part, said, tick, shunned)
        made += [shard] if shard else []
        lost += missing
    return made, lost


def tick(count: int) -> None:
    assert count == 1


def rows_of(cache: Cache, shard: Shard, specs: Any = (SPEC,)) -> dict[str, list[bytes]]:
    """The bytes of every array of every row, by key."""
    reader, found = Reader(cache), {}
    for row, key in enumerate(reader.keys(shard.digest)):
        found[bytes(key).hex()] = []
        for spec in specs:
            out = np.empty(spec.row_bytes, np.uint8)
            reader.read_into(out, shard.digest, spec.name, row)
            found[bytes(key).hex()].append(out.tobytes())
    return found


def wanted(rows: Rows) -> dict[str, list[bytes]]:
    return {key: [value.tobytes() for value in values.values()] for key, values in rows.items()}


def test_small_shards_become_one(cache: Cache, draw: Any, add: Add) -> None:
    rows = draw([SPEC, POOLED], 9)
    old = [add(cache, some(rows, number, number + 3, number + 6), (SPEC, POOLED), "text") for number in range(3)]
    (new,), lost = run(cache, 1 << 14)
    assert not lost and rows_of(cache, new, (SPEC, POOLED)) == wanted(rows)
    assert {shard.digest for shard in old} < set(cache.shards())  # they stay
    found = load_ledger(cache)
    assert {ref.shard for ref in found.resolve(rows).values()} == {new.digest}
    assert found.fields[found.shards.index(new)] == "text"
    assert run(cache) == ([], [])
    sound(cache)


def test_rows_that_two_shards_have_are_there_once(cache: Cache, draw: Any, add: Add) -> None:
    rows = draw([SPEC], 6)
    add(cache, some(rows, 0, 1, 2, 3))
    add(cache, some(rows, 2, 3, 4, 5))
    (new,), _ = run(cache)
    assert rows_of(cache, new) == wanted(rows) and new.rows == 6


def test_rows_of_another_shard_are_not_believed(cache: Cache, draw: Any, add: Add) -> None:
    """Two shards' bytes are swapped: every row has its checksum, and none is what its key says."""
    rows = draw([SPEC], 7)
    old = [add(cache, some(rows, 0, 1, 2)), add(cache, some(rows, 3, 4, 5)), add(cache, some(rows, 0, 6))]
    paths = [cache.shard(shard.digest) / "latent/c.0.0.0.0" for shard in old[:2]]
    swapped = [path.read_bytes() for path in reversed(paths)]
    for path, data in zip(paths, swapped, strict=True):
        path.chmod(0o644)
        path.write_bytes(data)
    (new,), lost = run(cache)
    assert rows_of(cache, new) == wanted(some(rows, 0, 6))
    assert [one.key for one in lost] == list(rows)[1:6]
    assert sorted(cache.names("damaged")) == sorted(shard.digest for shard in old[:2])


def test_what_a_large_shard_has_is_left_out(cache: Cache, draw: Any, add: Add) -> None:
    rows = draw([SPEC], 10)
    add(cache, some(rows, *range(6)))  # more than half of ten
    add(cache, some(rows, 1, 2, 7))
    add(cache, some(rows, 8))
    add(cache, some(rows, 3, 4))  # nothing of its own
    (new,), _ = run(cache)
    assert list(rows_of(cache, new)) == list(some(rows, 7, 8))


def test_field_shape_and_arrays_are_kept_apart(cache: Cache, draw: Any, add: Add) -> None:
    for field, specs, seed in (("latent", (SPEC,), 1), ("latent", (WIDE,), 2), ("text", (SPEC,), 3),
                               ("text", (SPEC, POOLED), 4)):
        rows = draw(specs, 4, seed)
        add(cache, some(rows, 0, 1), specs, field)
        add(cache, some(rows, 2, 3), specs, field)
    made, _ = run(cache)
    assert [shard.rows for shard in made] == [4] * 4
    sound(cache)


def test_parts_are_even_and_none_too_large(cache: Cache, draw: Any, add: Add) -> None:
    rows = draw([SPEC], 23)
    for number in range(0, 23, 3):
        add(cache, some(rows, *range(number, min(number + 3, 23))))
    made, _ = run(cache)
    assert sorted(shard.rows for shard in made) == [7, 8, 8]
    assert all(shard.bytes <= TEN for shard in made)
    together = {key: value for shard in made for key, value in rows_of(cache, shard).items()}
    assert together == wanted(rows)
    assert run(cache) == ([], [])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.integers(0, 39), min_size=1, max_size=14), min_size=1, max_size=12), st.integers(2, 12))
def test_any_shards_become_few_and_stay_so(
    tmp_path_factory: pytest.TempPathFactory, draw: Any, add: Add, shards: list[set[int]], most: int
) -> None:
    """Every row stays the same; twice is as once; no two shards are left that would fit into one together."""
    cache = open_cache(tmp_path_factory.mktemp("any") / "cache", create=True)
    rows = draw([SPEC], 40)
    for numbers in shards:
        add(cache, some(rows, *numbers))
    size = 4096 + most * ROW
    made, lost = run(cache, size)
    assert not lost and run(cache, size) == ([], [])
    present = some(rows, *set().union(*shards))
    refs = load_ledger(cache).resolve(present)
    assert set(refs) == set(present)
    for shard in made:
        assert rows_of(cache, shard).items() <= wanted(rows).items() and shard.rows <= most
    assert sum(2 * shard.rows < most for shard in made) <= 1


def test_one_small_shard_is_left_as_it_is(cache: Cache, draw: Any, add: Add) -> None:
    add(cache, draw([SPEC], 3))
    assert run(cache) == ([], []) and plan_joins(cache, empty_ledger(), shard_bytes=TEN) == []


def test_a_damaged_row_is_taken_from_another_shard_or_left_out(
    cache: Cache, draw: Any, add: Add, edit: Callable[..., None]
) -> None:
    rows = draw([SPEC], 5)
    first, second = add(cache, some(rows, 0, 1, 2)), add(cache, some(rows, 2, 3, 4))
    for shard, row in ((first, 1), (first, 2)):  # rows 1 and 2; the second shard has row 2, too
        edit(cache.shard(shard.digest) / "latent" / "c.0.0.0.0", lambda data, row=row: data.__setitem__(
            row * 52, data[row * 52] ^ 1))
    (new,), lost = run(cache)
    assert rows_of(cache, new) == wanted(some(rows, 0, 2, 3, 4))
    key = list(rows)[1]
    assert lost == [LostRow(field="latent", key=key, places=((first.digest, 1),))]
    assert {found.row for found in damage.recorded(cache, first.digest)} >= {1}
    assert not damage.recorded(cache, second.digest)
    assert load_ledger(cache).find(key) is None  # so it is encoded again
    assert run(cache) == ([], [])


def test_nothing_is_made_of_damaged_rows_alone(
    cache: Cache, draw: Any, add: Add, edit: Callable[..., None]
) -> None:
    for seed in (1, 2):
        shard = add(cache, draw([SPEC], 1, seed))
        edit(cache.shard(shard.digest) / "latent" / "c.0.0.0.0", lambda data: data.__setitem__(0, data[0] ^ 1))
    made, lost = run(cache)
    assert not made and len(lost) == 2 and not list((cache.root / "tmp").iterdir())


def test_shards_that_cannot_be_read_are_left_alone(
    cache: Cache, draw: Any, add: Add, edit: Callable[..., None]
) -> None:
    shards = [add(cache, draw([SPEC], 2, seed)) for seed in range(4)]
    edit(cache.shard(shards[0].digest) / "latent" / "zarr.json", lambda data: data.__setitem__(5, data[5] ^ 1))
    damage.record(cache, [Damage(shard=shards[1].digest, field=None, array=None, row=None, what="bad")])
    (new,), lost = run(cache)
    assert new.rows == 4 and not lost


def test_what_could_not_be_made_is_still_known_when_the_old_shards_are_gone(
    cache: Cache, draw: Any, add: Add
) -> None:
    rows = draw([SPEC], 4)
    reject = Reject(key="ab" * 32, code="truncated", detail="ends")
    old = [add(cache, some(rows, 0, 1), rejects=[reject]), add(cache, some(rows, 2, 3))]
    run(cache)
    for task in list(cache.names("commits")):
        found = read_commit(cache, task)
        if found is not None and found.shard in old:
            cache.commit(task).unlink()
    assert load_ledger(cache).rejected("ab" * 32) == reject


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_anywhere_loses_nothing_and_the_next_run_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Any, add: Add, stride: int
) -> None:
    rows = draw([SPEC], 16)
    for number in range(0, 16, 4):
        add(open_cache(tmp_path / "begun", create=True), some(rows, *range(number, number + 4)))
    disk = Disk(monkeypatch)

    def begun(root: Path) -> Cache:
        return Cache(root=Path(shutil.copytree(tmp_path / "begun", root)))

    cache = begun(tmp_path / "whole")
    disk.left = 1 << 30
    run(cache)
    steps, whole = (1 << 30) - disk.left, state(cache.root)
    assert steps > 50 and len(list(cache.shards())) == 6
    for point in range(0, steps, stride):
        disk.left = 1 << 30
        cache = begun(tmp_path / str(point))
        disk.left = point
        with pytest.raises(Crashed):
            run(cache)
        disk.left = 1 << 30
        sound(cache)
        assert set(load_ledger(cache).resolve(rows)) == set(rows)
        run(cache)
        assert state(cache.root) == whole, f"crash before step {point}"


def test_a_part_knows_what_it_will_take(cache: Cache, draw: Any, add: Add) -> None:
    for seed in (1, 2):
        add(cache, draw([SPEC], 3, seed))
    (part,) = plan_joins(cache, load_ledger(cache), shard_bytes=TEN)
    assert isinstance(part, Part) and part.row_bytes == ROW and len(part.first) == 6 and len(part.sources) == 2
