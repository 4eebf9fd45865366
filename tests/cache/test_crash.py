"""The power goes at each write, sync, rename, link and removal in turn; running the same again ends in the same cache.

`Crashed` is no `Exception`, and once it was raised every later change of the disk raises it too, so that no clean-up
of ours runs: what is left is what a dead process leaves. (The whole command, real deaths, and what the kernel still
held back when the power went: tests/faults. Here it is the order of the calls that is checked.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crashes import Crashed, Disk, sound, state

from prep.arrays import ArraySpec
from prep.cache import plans
from prep.cache import shard_check as verify
from prep.cache.ledger.ledger import is_finished, load_ledger, write_commit
from prep.cache.publish import clear_leftovers
from prep.cache.records import Task
from prep.cache.store import Cache, open_cache
from prep.maintenance import repair
from prep.manifest import tables

SPEC = ArraySpec(name="latent", dtype="bfloat16", shape=(4, 3, 2))
WANTED = "ef" * 32
Put = Callable[..., Any]


def job(root: Path, draw: Any, put: Put) -> Cache:
    """All that an encode does to a cache: two tasks, tables, and the plan's end."""
    cache = open_cache(root, create=True)
    parts = [draw([SPEC], 3, seed) for seed in range(2)]
    wanted = [Task(key=f"{place:064x}", field="latent", rows=tuple(part)) for place, part in enumerate(parts)]
    for task, part in zip(plans.write_plan(cache, WANTED, wanted), parts, strict=True):
        if not is_finished(cache, task.key):
            write_commit(cache, task, put(cache, "latent", [SPEC], part), [], {})
    tables.write_table(cache, tables.build_findings([]))
    plans.remove_plan(cache, WANTED)
    return cache


def count(disk: Disk, work: Callable[[], Any]) -> int:
    """The changes of the disk that `work` makes."""
    disk.left = 1 << 30
    work()
    return (1 << 30) - disk.left


def test_a_crash_anywhere_leaves_rubbish_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Any, put: Put
) -> None:
    disk = Disk(monkeypatch)
    steps = count(disk, lambda: job(tmp_path / "whole", draw, put))
    wanted = state(tmp_path / "whole")
    assert steps > 60
    for point in range(steps):
        root = tmp_path / str(point)
        disk.left = point
        with pytest.raises(Crashed):
            job(root, draw, put)
        disk.left = 1 << 30
        if (root / "latentry.json").exists():
            sound(open_cache(root, create=False))
        cache = job(root, draw, put)
        sound(cache)
        assert state(root) == wanted, f"crash before step {point}: {disk.seen[point]}"
        clear_leftovers(cache)


def test_a_crash_in_a_repair_loses_no_good_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Any, put: Put, edit: Callable[..., None]
) -> None:
    disk = Disk(monkeypatch)
    rows = draw([SPEC], 3, 0)
    bad = list(rows)[1]

    def harmed(root: Path) -> tuple[Cache, str]:
        cache = job(root, draw, put)
        shard = next(digest for digest in cache.shards() if load_ledger(cache).resolve(rows)[bad].shard == digest)
        edit(cache.shard(shard) / "latent" / "c.0.0.0.0", lambda data: data.__setitem__(52, data[52] ^ 1))
        verify.verify_shard(cache, shard)
        return cache, shard

    cache, shard = harmed(tmp_path / "whole")
    steps = count(disk, lambda: repair.salvage(cache, shard))
    wanted = state(cache.root)
    for point in range(steps):
        cache, shard = harmed(tmp_path / str(point))
        disk.left = point
        with pytest.raises(Crashed):
            repair.salvage(cache, shard)
        disk.left = 1 << 30
        assert set(load_ledger(cache).resolve(rows)) == set(rows) - {bad}
        for left in repair.damaged_shards(cache):
            repair.salvage(cache, left)
        assert set(load_ledger(cache).resolve(rows)) == set(rows) - {bad}
        assert state(cache.root) == wanted, f"crash before step {point}"


def test_nothing_is_named_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Any, put: Put
) -> None:
    """Every file written is synced before the next rename or link; every rename is followed by a directory's sync."""
    disk = Disk(monkeypatch)
    job(tmp_path / "cache", draw, put)
    dirty: set[str] = set()
    for place, (name, path) in enumerate(disk.seen):
        if name == "write":
            dirty.add(path)
        elif name == "sync":
            dirty.discard(path)
        elif name in ("rename", "link"):
            assert not dirty, f"{path} was named while {dirty} was not on the disk"
            assert "sync_dir" in [later for later, _ in disk.seen[place + 1 : place + 3]]


def test_commits_come_after_their_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Any, put: Put) -> None:
    disk = Disk(monkeypatch)
    job(tmp_path / "cache", draw, put)
    below = [(name, path.removeprefix(str(tmp_path / "cache"))) for name, path in disk.seen]
    order = [name for name, path in below if path.startswith("/tmp/") and name in ("rename", "link")]
    wanted = ["link", "link", "rename", "link", "rename", "link", "rename"]
    assert order == wanted, "marker, plan, (shard, commit) twice, table"
