"""From a recipe to a manifest in four steps: want, plan, run, seal. To recover from any failure, run it again.

    want    sources → surveyed items → buckets → samples with the keys of all their rows
    plan    the rows that the ledger lacks, split into tasks of one shard; stored, and followed by later runs
    run     an executor makes the tasks' shards and commits (prep.encode.engines)
    seal    commits → tables → manifest (prep.encode.assemble); the plan is removed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from prep.cache.ledger.ledger import Ledger, empty_ledger, forget_rejects, load_ledger, remove_foreign_commits
from prep.cache.plans import read_plan, remove_plan, write_plan
from prep.cache.records import RowRef, Task
from prep.cache.store import Cache, sync_recent_directories
from prep.digest import digest_json, digest_strings
from prep.encode.targets import Targets
from prep.encode.text_groups import TextGroups
from prep.fs import atomic


class Wanted(Protocol):
    """Wanted rows, their sizes and groups: `ResolvedRecipe`, or less."""

    @property
    def wants(self) -> Targets: ...
    @property
    def text_groups(self) -> TextGroups: ...
    def group_of(self, field: str, key: str) -> tuple[int, int]: ...
    def row_bytes(self, field: str, key: str) -> int: ...


SHARD_BYTES = 256 << 20
TASK_ROWS = 256  # at most: an interruption loses one task, some seconds on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodePlan:
    """The wanted rows in the cache, and the tasks that make the missing rows."""

    ledger: Ledger
    refs: Mapping[str, RowRef]  # places of the wanted rows in the cache
    tasks: tuple[Task, ...]  # not finished yet
    missing: dict[str, int]  # rows to encode, by field
    reused: dict[str, int]  # wanted rows in the cache, by field
    bytes: int  # of the missing rows
    digest: str  # of all wanted keys: the plan's name


def plan(wanted: Wanted, cache: Cache | None, *, shard_bytes: int = SHARD_BYTES, store: bool = True,
         retry: bool = False) -> EncodePlan:
    """The tasks to run: with `store`, those of the stored plan if there is one; without a cache, all.

    With `retry`, also those of rows rejected before; with `store` too, their rejections are removed.
    """
    if cache is None or not store:
        return _compare_with_ledger(wanted, cache, shard_bytes, remember=False, retry=retry)
    if retry:
        forget_rejects(cache, frozenset(wanted.wants.keys()))
    planned = _compare_with_ledger(wanted, cache, shard_bytes)
    stored = read_plan(cache, planned.digest)
    if stored is not None:
        sync_recent_directories(cache)  # the process that followed it may have died
    elif planned.tasks:
        stored = write_plan(cache, planned.digest, planned.tasks)
        # Another process may have finished the same plan, and removed it, after the first comparison.
        planned = _compare_with_ledger(wanted, cache, shard_bytes)
    tasks = _follow_stored(tuple(_valid_tasks(wanted, stored or ())), planned.tasks)
    remove_foreign_commits(cache, tasks)
    return replace(planned, tasks=tasks)


def _compare_with_ledger(wanted: Wanted, cache: Cache | None, shard_bytes: int, *, remember: bool = True,
                         retry: bool = False) -> EncodePlan:
    """The wanted rows in the cache, and tasks for the missing rows; with `retry`, for rejected rows too."""
    ledger = empty_ledger() if cache is None else load_ledger(cache, remember=remember)
    keys = wanted.wants.keys()
    digest = digest_strings(keys)
    there = ledger.resolve(keys)
    by_field = wanted.wants.by_field()
    missing = {field: [key for key in names if key not in there and (retry or ledger.rejected(key) is None)]
               for field, names in by_field.items()}
    wanted.text_groups.count(missing["text"])
    tasks = _tasks(wanted, missing, shard_bytes)
    return EncodePlan(
        ledger=ledger, refs=there, tasks=tuple(tasks), digest=digest,
        missing={field: len(names) for field, names in missing.items()},
        reused={field: sum(key in there for key in names) for field, names in by_field.items()},
        bytes=sum(len(task.rows) * wanted.row_bytes(task.field, task.rows[0]) for task in tasks),
    )


def drop_plan(cache: Cache, planned: EncodePlan, manifest: Path) -> None:
    """Removes the plan of a sealed manifest, once the manifest is on the disk: a killed run may not have synced it."""
    if cache.plan(planned.digest).exists():  # else nothing is written: the cache may be read-only
        atomic.sync_dir(manifest.parent)
        remove_plan(cache, planned.digest)


def _tasks(wanted: Wanted, missing: dict[str, list[str]], shard_bytes: int) -> list[Task]:
    """Tasks of one field and one shape, their rows sorted by key, in a fixed order."""
    tasks: list[Task] = []
    for field, names in missing.items():
        groups: dict[tuple[int, int], list[str]] = {}
        for key in names:
            groups.setdefault(wanted.group_of(field, key), []).append(key)
        for group in sorted(groups):
            most = min(TASK_ROWS, max(1, shard_bytes // wanted.row_bytes(field, groups[group][0])))
            tasks += [_task(field, rows) for rows in _cut(groups[group], most)]
    return tasks


def _valid_tasks(wanted: Wanted, stored: Iterable[Task]) -> Iterator[Task]:
    """The tasks of a stored plan that are valid for these wants: rows of one field and shape, none of them twice.

    The cache is untrusted: no plan in it may get a row encoded as another field or shape.
    """
    fields = {key: field for field, keys in wanted.wants.by_field().items() for key in keys}
    seen: set[str] = set()
    for task in stored:
        shapes = {(fields.get(key), wanted.group_of(task.field, key)) for key in task.rows}
        if len(shapes) == 1 and {field for field, _ in shapes} == {task.field} and seen.isdisjoint(task.rows):
            seen.update(task.rows)
            yield _task(task.field, task.rows)


def _follow_stored(stored: Sequence[Task], tasks: Sequence[Task]) -> tuple[Task, ...]:
    """`tasks`, split as in the stored plan; rows that it lacks were in the cache when it was made, and lost since."""
    missing = {key for task in tasks for key in task.rows}
    planned = {key for task in stored for key in task.rows}
    return (*_remaining(stored, missing), *_remaining(tasks, missing - planned))


def _remaining(tasks: Sequence[Task], missing: set[str]) -> Iterator[Task]:
    """The missing part of `tasks`: unfinished tasks unchanged, and new tasks for the rest of partly finished ones.

    A task is partly finished only if some of its rows failed at the time, for example because of an unreadable file.
    """
    for task in tasks:
        rows = [key for key in task.rows if key in missing]
        if rows:
            yield task if len(rows) == len(task.rows) else _task(task.field, rows)


def _task(field: str, rows: Sequence[str]) -> Task:
    return Task(key=digest_json({"kind": "task", "field": field, "rows": list(rows)}), field=field, rows=tuple(rows))


def _cut(keys: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    return (keys[start:start + most] for start in range(0, len(keys), most))
