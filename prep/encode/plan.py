"""From a recipe to a manifest: want, plan, run, seal. Running it again is the recovery from anything.

    want    sources → surveyed items → buckets → samples with the keys of all their rows
    plan    the rows that the ledger lacks, cut into tasks of one shard; stored, and followed by whoever comes later
    run     an executor makes the tasks' shards and commits (prep.encode.engines)
    seal    commits → tables → manifest (prep.encode.assemble); the plan goes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prep.cache.ledger.ledger import Ledger, empty_ledger, forget_rejects, load_ledger, remove_foreign_commits
from prep.cache.plans import read_plan, remove_plan, write_plan
from prep.cache.records import RowRef, Task
from prep.cache.store import Cache, sync_recent_directories
from prep.digest import digest_json, digest_strings
from prep.encode.resolve import ResolvedRecipe
from prep.fs import atomic

SHARD_BYTES = 256 << 20
TASK_ROWS = 256  # at most: what an interruption costs, some seconds on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodePlan:
    """What is there and what is to be done."""

    ledger: Ledger
    refs: Mapping[str, RowRef]  # places of the wanted rows that are there
    tasks: tuple[Task, ...]  # not finished yet
    missing: dict[str, int]  # rows to be made, by field
    reused: dict[str, int]  # rows that are there, by field
    bytes: int  # that the missing rows will take
    digest: str  # of all wanted keys: the plan's name


def plan(wanted: ResolvedRecipe, cache: Cache | None, *, shard_bytes: int = SHARD_BYTES, store: bool = True,
         retry: bool = False) -> EncodePlan:
    """The tasks to be run; with `store`, those of the stored plan where there is one; without a cache, all.

    With `retry` also those of rows that were rejected before; with `store` too, that is forgotten.
    """
    if cache is None or not store:
        return _compare_with_ledger(wanted, cache, shard_bytes, remember=False, retry=retry)
    if retry:
        forget_rejects(cache, frozenset(wanted.wants.keys()))
    planned = _compare_with_ledger(wanted, cache, shard_bytes)
    stored = read_plan(cache, planned.digest)
    if stored is not None:
        sync_recent_directories(cache)  # whoever was at it may be dead
    elif planned.tasks:
        stored = write_plan(cache, planned.digest, planned.tasks)
        # Whoever was at the same may have ended, and taken the plan away, after the first look.
        planned = _compare_with_ledger(wanted, cache, shard_bytes)
    tasks = _follow_stored(tuple(_valid_tasks(wanted, stored or ())), planned.tasks)
    remove_foreign_commits(cache, tasks)
    return replace(planned, tasks=tasks)


def _compare_with_ledger(wanted: ResolvedRecipe, cache: Cache | None, shard_bytes: int, *, remember: bool = True,
                         retry: bool = False) -> EncodePlan:
    """What is there now, and tasks of what is not; with `retry`, of what was rejected, too."""
    ledger = empty_ledger() if cache is None else load_ledger(cache, remember=remember)
    keys = wanted.wants.keys()
    digest = digest_strings(keys)
    there = ledger.resolve(keys)
    by_field = wanted.wants.by_field()
    missing = {field: [key for key in names if key not in there and (retry or ledger.rejected(key) is None)]
               for field, names in by_field.items()}
    tasks = _tasks(wanted, missing, shard_bytes)
    return EncodePlan(
        ledger=ledger, refs=there, tasks=tuple(tasks), digest=digest,
        missing={field: len(names) for field, names in missing.items()},
        reused={field: sum(key in there for key in names) for field, names in by_field.items()},
        bytes=sum(len(task.rows) * _row_bytes(wanted, task.field, task.rows[0]) for task in tasks),
    )


def drop_plan(cache: Cache, planned: EncodePlan, manifest: Path) -> None:
    """The manifest is sealed, and on the disk also where a run that was killed had put it there: the plan goes."""
    if cache.plan(planned.digest).exists():  # else nothing is written: the cache may be one that only can be read
        atomic.sync_dir(manifest.parent)
        remove_plan(cache, planned.digest)


def _tasks(wanted: ResolvedRecipe, missing: dict[str, list[str]], shard_bytes: int) -> list[Task]:
    """Tasks of one field and one shape, their rows sorted by key, in a fixed order."""
    tasks: list[Task] = []
    for field, names in missing.items():
        groups: dict[tuple[int, int], list[str]] = {}
        for key in names:
            groups.setdefault(wanted.wants.bucket_of(field, key) or (0, 0), []).append(key)
        for bucket in sorted(groups):
            most = min(TASK_ROWS, max(1, shard_bytes // _row_bytes(wanted, field, groups[bucket][0])))
            tasks += [_task(field, rows) for rows in _cut(groups[bucket], most)]
    return tasks


def _valid_tasks(wanted: ResolvedRecipe, stored: Iterable[Task]) -> Iterator[Task]:
    """The tasks of a stored plan that a plan of these wants can have: rows of one field and shape, none of them twice.

    Whoever else has written to the cache, no row is made as another's.
    """
    fields = {key: field for field, keys in wanted.wants.by_field().items() for key in keys}
    seen: set[str] = set()
    for task in stored:
        shapes = {(fields.get(key), wanted.wants.bucket_of(task.field, key)) for key in task.rows}
        if len(shapes) == 1 and {field for field, _ in shapes} == {task.field} and seen.isdisjoint(task.rows):
            seen.update(task.rows)
            yield _task(task.field, task.rows)


def _follow_stored(stored: Sequence[Task], tasks: Sequence[Task]) -> tuple[Task, ...]:
    """`tasks`, cut as in the stored plan; rows that it has not were there when it was made, and are lost since."""
    missing = {key for task in tasks for key in task.rows}
    planned = {key for task in stored for key in task.rows}
    return (*_remaining(stored, missing), *_remaining(tasks, missing - planned))


def _remaining(tasks: Sequence[Task], missing: set[str]) -> Iterator[Task]:
    """What of `tasks` is still to be made: whole tasks as they were cut, and the rest of others.

    A task is begun only where some of its rows could not be made at the time, a file that could not be read, say.
    """
    for task in tasks:
        rows = [key for key in task.rows if key in missing]
        if rows:
            yield task if len(rows) == len(task.rows) else _task(task.field, rows)


def _task(field: str, rows: Sequence[str]) -> Task:
    return Task(key=digest_json({"kind": "task", "field": field, "rows": list(rows)}), field=field, rows=tuple(rows))


def _cut(keys: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    return (keys[start:start + most] for start in range(0, len(keys), most))


def _row_bytes(wanted: ResolvedRecipe, field: str, key: str) -> int:
    return wanted.specs.row_bytes(field, wanted.wants.bucket_of(field, key))
