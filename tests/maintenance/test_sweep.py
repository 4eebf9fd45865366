"""What of a cache goes and what stays; a crash in between takes nothing that is needed."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crashes import Crashed, Disk, sound, state

from prep.arrays import ArraySpec
from prep.cache import commits, damage, plans
from prep.cache.damage import Damage
from prep.cache.ledger.ledger import load_ledger, write_commit
from prep.cache.records import Reject, Shard, Task
from prep.cache.store import Cache, open_cache
from prep.digest import digest_json
from prep.errors import CacheError, UsageError
from prep.fs import atomic
from prep.fs.lock import lock_directory
from prep.maintenance import repair, stock, sweep
from prep.maintenance.sweep import ABANDONED, Needed, Sweep
from prep.manifest import tables
from prep.progress import Tick

SPEC = ArraySpec(name="latent", dtype="bfloat16", shape=(4, 3, 2))
DAY = 86400.0
Put = Callable[..., Any]


def task_of(rows: Any) -> Task:
    return Task(key=digest_json({"rows": list(rows)}), field="latent", rows=tuple(rows))


@pytest.fixture
def add(draw: Any, put: Put) -> Callable[..., tuple[Shard, Task]]:
    """`add(cache, seed)`: a shard of three rows with its commit."""

    def go(cache: Cache, seed: int, count: int = 3) -> tuple[Shard, Task]:
        rows = draw([SPEC], count, seed)
        shard = put(cache, "latent", [SPEC], rows)
        write_commit(cache, task_of(rows), shard, [], {})
        return shard, task_of(rows)

    return go


def age(root: Path, days: float) -> None:
    """Everything below `root` was written that long ago."""
    then = time.time() - days * DAY
    for path in (root, *root.rglob("*")):
        os.utime(path, (then, then))


def shard_table(cache: Cache, *shards: Shard) -> str:
    return tables.write_table(cache, tables.build_shards([
        {"digest": shard.digest, "field": "latent", "rows": shard.rows, "bytes": shard.bytes, "shapes": "{}",
         "dtypes": "{}"} for shard in shards]))


def needed(*shards: Shard, names: tuple[str, ...] = ()) -> Needed:
    return Needed(shards={shard.digest: (shard.bytes, "m.json") for shard in shards}, tables=frozenset(names))


def remove(cache: Cache, found: Sweep, tick: Tick = lambda _: None) -> None:
    stock.stock_of(cache).remove(found.remove, found.things, lambda: None, tick)


def test_what_no_manifest_names_goes(cache: Cache, add: Any) -> None:
    (kept, kept_task), (other, other_task) = add(cache, 1), add(cache, 2)
    table, old = tables.write_table(cache, tables.build_findings([])), shard_table(cache, other)
    nothing = Task(key="ab" * 32, field="latent", rows=("cd" * 32,))
    write_commit(cache, nothing, None, [Reject(key="cd" * 32, code="truncated", detail="ends")], {})
    for shard in (kept.digest, other.digest, "ef" * 32):
        damage.record(cache, [Damage(shard=shard, field=None, array="latent", row=1, what="bad")])
    lost = add(cache, 3)
    for path in sorted(cache.shard(lost[0].digest).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    cache.shard(lost[0].digest).rmdir()  # a commit without its shard
    (cache.stage() / "rubbish").write_bytes(b"12345")
    (cache.root / "shards" / "notes.txt").write_text("mine")
    age(cache.root, 2)
    found = sweep.find_garbage(cache, needed(kept, names=(table,)), guard=DAY)
    assert set(found.remove["commits"]) == {other_task.key, lost[1].key}
    assert found.remove["shards"] == (other.digest,) and found.remove["tables"] == (old,)
    assert set(found.remove["damaged"]) == {other.digest, "ef" * 32}
    assert (found.staging, found.sizes["staging"], found.sizes["shards"]) == (1, 5, other.bytes)
    assert (found.keep["shards"], found.keep["tables"]) == ((kept.digest,), (table,))
    assert set(found.keep["commits"]) == {kept_task.key, nothing.key} and found.guarded == 0
    ticks: list[int] = []
    remove(cache, found, ticks.append)
    assert len(ticks) == 2 + 1 + 1 + 2
    assert list(cache.shards()) == [kept.digest] and list(cache.names("tables")) == [table]
    assert list(cache.names("damaged")) == [kept.digest] and not (cache.root / "tmp").exists()
    assert load_ledger(cache).rejected("cd" * 32) is not None
    assert (cache.root / "shards" / "notes.txt").read_text() == "mine"
    after = sweep.find_garbage(cache, needed(kept, names=(table,)), guard=0)
    assert not any(after.remove.values()) and not after.staging


def test_what_is_young_stays(cache: Cache, add: Any) -> None:
    (kept, _), (old, old_task), (young, young_task) = (add(cache, seed) for seed in (1, 2, 3))
    age(cache.root, 2)
    for path in (cache.shard(young.digest) / "zarr.json", cache.commit(young_task.key)):
        path.touch()
    found = sweep.find_garbage(cache, needed(kept), guard=DAY)
    assert found.remove["shards"] == (old.digest,) and found.remove["commits"] == (old_task.key,)
    assert found.guarded == 2
    assert set(sweep.find_garbage(cache, needed(kept), guard=0).remove["shards"]) == {old.digest, young.digest}
    assert not any(sweep.find_garbage(cache, needed(), guard=3 * DAY).remove.values())


def test_what_a_young_thing_names_stays(cache: Cache, add: Any) -> None:
    """A commit of today, or a manifest's table of today, may name a shard of last week."""
    (_, task), (by_table, _), (neither, _) = (add(cache, seed) for seed in (1, 2, 3))
    table = shard_table(cache, by_table)
    tables.write_table(cache, tables.build_findings([]))  # young, and no table of shards
    age(cache.root, 9)
    for path in (cache.table(table), cache.commit(task.key)):
        path.touch()
    assert sweep.find_garbage(cache, needed(), guard=DAY).remove["shards"] == (neither.digest,)


def test_an_unfinished_plan_keeps_its_rows_wherever_they_are(cache: Cache, draw: Any, put: Put, add: Any) -> None:
    rows = draw([SPEC], 6, 1)
    tasks = [task_of(list(rows)[:3]), task_of(list(rows)[3:])]
    plans.write_plan(cache, "aa" * 32, tasks)
    part = {key: rows[key] for key in list(rows)[3:5]}  # of the second task what could be made, under another name
    planned = put(cache, "latent", [SPEC], part)
    write_commit(cache, task_of(part), planned, [], {})
    other, other_task = add(cache, 2)
    age(cache.root, 2)
    found = sweep.find_garbage(cache, needed(), guard=0)
    assert found.remove["shards"] == (other.digest,) and found.remove["commits"] == (other_task.key,)
    assert found.keep["plans"] == ("aa" * 32,) and found.guarded == 0
    age(cache.root, ABANDONED / DAY + 1)
    found = sweep.find_garbage(cache, needed(), guard=DAY)
    assert set(found.remove["shards"]) == {other.digest, planned.digest} and found.remove["plans"] == ("aa" * 32,)


def test_a_plan_that_is_named_is_given_up_however_young(cache: Cache, add: Any) -> None:
    (kept, first), (other, second) = add(cache, 1), add(cache, 2)
    plans.write_plan(cache, "aa" * 32, [first])
    plans.write_plan(cache, "bb" * 32, [second])
    assert not any(sweep.find_garbage(cache, needed(), guard=0).remove.values())
    found = sweep.find_garbage(cache, needed(), guard=0, abandon=["bb" * 6])
    assert found.remove["plans"] == ("bb" * 32,) and found.keep["plans"] == ("aa" * 32,)
    assert found.remove["shards"] == (other.digest,) and found.keep["shards"] == (kept.digest,)
    young = sweep.find_garbage(cache, needed(), guard=DAY, abandon=["bb" * 6])
    assert young.remove["plans"] == ("bb" * 32,) and not young.remove["shards"] and not young.remove["commits"]
    for wrong in ("bbbb", "cc" * 6, "../" * 4):
        with pytest.raises(UsageError, match=f"--abandon is '{wrong}', expected a plan of .*: {'aa' * 6}, {'bb' * 6}"):
            sweep.find_garbage(cache, needed(), guard=0, abandon=[wrong])
    plans.remove_plan(cache, "aa" * 32)
    plans.remove_plan(cache, "bb" * 32)
    with pytest.raises(UsageError, match="it has none"):
        sweep.find_garbage(cache, needed(), guard=0, abandon=["bb" * 6])


def test_a_plan_that_was_worked_on_is_not_abandoned(cache: Cache, add: Any) -> None:
    _, task = add(cache, 1)
    plans.write_plan(cache, "aa" * 32, [task])
    age(cache.root, 30)
    cache.commit(task.key).touch()
    assert not any(sweep.find_garbage(cache, needed(), guard=0).remove.values())


@pytest.mark.parametrize("rejected", [False, True])
def test_a_plan_of_which_only_what_was_left_of_a_task_was_made_is_not_abandoned(
    cache: Cache, draw: Any, put: Put, rejected: bool
) -> None:
    """The rest of a partly finished task is a task of its own: the plan does not name its commit."""
    rows = draw([SPEC], 6, 1)
    plans.write_plan(cache, "aa" * 32, [task_of(list(rows)[:3]), task_of(list(rows)[3:])])
    made, rest = ({key: rows[key] for key in list(rows)[part]} for part in (slice(3, 5), slice(5, 6)))
    shard = put(cache, "latent", [SPEC], made)
    write_commit(cache, task_of(made), shard, [], {})
    age(cache.root, 30)
    assert sweep.find_garbage(cache, needed(), guard=DAY).remove["plans"] == ("aa" * 32,)
    if rejected:
        write_commit(cache, task_of(rest), None, [Reject(key=next(iter(rest)), code="truncated", detail="")], {})
    else:
        write_commit(cache, task_of(rest), put(cache, "latent", [SPEC], rest), [], {})
    assert not any(sweep.find_garbage(cache, needed(), guard=0).remove.values())


def test_for_a_young_plan_on_a_disk_no_keys_are_read(
    cache: Cache, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many commits as an encode has made since; when it last went on, only the error of a store says."""
    kept, task = add(cache, 1)
    plans.write_plan(cache, "aa" * 32, [task])
    age(cache.root, 1)
    newer, _ = add(cache, 2)
    monkeypatch.setattr(sweep, "read_keys", lambda cache, digest: pytest.fail("keys were read"))
    assert sweep.find_garbage(cache, needed(kept, newer), guard=0).keep["plans"] == ("aa" * 32,)


def test_what_cannot_be_understood_goes_when_it_is_old(cache: Cache, add: Any, edit: Callable[..., None]) -> None:
    shard, task = add(cache, 1)
    plans.write_plan(cache, "aa" * 32, [task])
    for path in (cache.commit(task.key), cache.plan("aa" * 32)):
        edit(path, lambda data: data.__setitem__(5, data[5] ^ 1))
    assert not any(sweep.find_garbage(cache, needed(shard), guard=DAY).remove.values())
    age(cache.root, 2)
    found = sweep.find_garbage(cache, needed(shard), guard=DAY)
    assert found.remove["commits"] == (task.key,) and found.remove["plans"] == ("aa" * 32,)
    assert found.keep["shards"] == (shard.digest,)


def test_damaged_keys_and_tables_keep_nothing(cache: Cache, add: Any, edit: Callable[..., None]) -> None:
    (shard, task), (other, _) = add(cache, 1), add(cache, 2)
    plans.write_plan(cache, "aa" * 32, [task])
    table = shard_table(cache, other)
    edit(cache.shard(shard.digest) / "key" / "c.0.0", lambda data: data.__setitem__(5, data[5] ^ 1))
    edit(cache.table(table), lambda data: data.__setitem__(200, data[200] ^ 1))
    age(cache.root, 2)
    cache.table(table).touch()
    assert set(sweep.find_garbage(cache, needed(), guard=DAY).remove["shards"]) == {shard.digest, other.digest}


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_anywhere_takes_nothing_needed_and_a_second_run_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add: Any, stride: int
) -> None:
    cache = open_cache(tmp_path / "begun", create=True)
    kept, _ = add(cache, 1)
    need = needed(kept, names=(shard_table(cache, kept),))
    for seed in (2, 3):
        shard, task = add(cache, seed)
        shard_table(cache, shard)
        damage.record(cache, [Damage(shard=shard.digest, field=None, array=None, row=None, what="bad")])
    plans.write_plan(cache, "aa" * 32, [task])
    (cache.stage() / "rubbish").write_bytes(b"1")
    disk = Disk(monkeypatch)

    def begun(root: Path) -> Cache:
        shutil.copytree(tmp_path / "begun", root)
        age(root, 30)
        return Cache(root=root)

    def clean(cache: Cache, need: Needed) -> None:
        remove(cache, sweep.find_garbage(cache, need, guard=DAY))

    cache = begun(tmp_path / "whole")
    disk.left = 1 << 30
    clean(cache, need)
    steps, wanted = (1 << 30) - disk.left, state(cache.root)
    assert steps > 30 and set(cache.shards()) == need.shards.keys()
    for point in range(0, steps, stride):
        cache = begun(tmp_path / str(point))
        disk.left = point
        with pytest.raises(Crashed):
            clean(cache, need)
        disk.left = 1 << 30
        sound(cache)  # no commit is left without its shard
        assert need.shards.keys() <= set(cache.shards()) and need.tables <= set(cache.names("tables"))
        clean(cache, need)
        assert state(cache.root) == wanted, f"crash before step {point}"
        assert not (cache.root / "tmp").exists()


@pytest.mark.parametrize("staged", [False, True], ids=["no tmp", "tmp"])
def test_a_disk_without_a_free_block_is_freed(
    cache: Cache, add: Any, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    """Neither a file, a directory nor another name can be made there."""
    (kept, kept_task), (gone, _) = add(cache, 1), add(cache, 2)
    table = shard_table(cache, gone)
    damage.record(cache, [Damage(shard=gone.digest, field=None, array="latent", row=1, what="bad")])
    (cache.staging() / "left").write_bytes(b"x")
    if not staged:
        shutil.rmtree(cache.root / "tmp")

    def full(path: Any, *rest: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for name in ("create", "make_dir", "rename", "link"):
        monkeypatch.setattr(atomic, name, full)
    with lock_directory(cache.root, exclusive=True):
        remove(cache, sweep.find_garbage(cache, needed(kept), guard=0))
    assert list(cache.shards()) == [kept.digest] and list(cache.names("commits")) == [kept_task.key]
    assert not cache.table(table).exists() and not cache.damaged(gone.digest).exists()
    assert not (cache.root / "tmp").exists()


def test_leftovers_of_any_depth_are_counted_and_removed(cache: Cache) -> None:
    """Deeper than Python calls functions, and than a path may be long."""
    here = Path.cwd()
    try:
        os.chdir(cache.staging())
        for _ in range(2500):
            Path("d").mkdir()
            os.chdir("d")
        Path("file").write_bytes(b"x")
    finally:
        os.chdir(here)
    found = sweep.find_garbage(cache, needed(), guard=0)
    assert found.staging == 1
    remove(cache, found)
    assert not (cache.root / "tmp").exists()


def test_nothing_is_removed_from_a_cache_that_is_seen_in_part(
    cache: Cache, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits in a directory of another user may be of shards that are needed."""
    _, task = add(cache, 1)
    hidden = cache.commit(task.key).parent
    monkeypatch.setattr(Cache, "closed", lambda self, kind: [hidden] if kind == "commits" else [])
    with pytest.raises(CacheError, match=r"commits/.. cannot be listed \(no permission\), so nothing is removed"):
        sweep.find_garbage(cache, needed(), guard=0)


def test_a_commit_that_cannot_be_read_is_not_taken_for_a_damaged_one(
    cache: Cache, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, task = add(cache, 1)

    def refuse(path: Path, most: int) -> bytes:
        raise PermissionError(errno.EACCES, "no", str(path))

    monkeypatch.setattr(commits, "read_regular", refuse)
    assert commits.read_commit(cache, task.key) is None and not commits.is_damaged(cache, task.key)
    with pytest.raises(PermissionError):
        sweep.find_garbage(cache, needed(), guard=0)
    repair.repair_commits(cache, [task.key])
    assert cache.commit(task.key).exists()
