"""From a recipe to a manifest in four steps: resolve, plan, run, assemble. To recover from any failure, run it again.

    resolve   sources → surveyed items → buckets → samples with the keys of all their rows (prep.encode.resolve)
    plan      the rows that the ledger lacks, split into tasks of one shard; stored, and followed by later runs
    run       an engine makes the tasks' shards and commits (prep.encode.engines)
    assemble  commits → tables → manifest (prep.encode.manifest.assemble); the plan is removed
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prep.cache.ledger.ledger import (
    Ledger,
    StoredRows,
    empty_ledger,
    forget_rejects,
    load_ledger,
    remove_foreign_commits,
)
from prep.cache.plans import read_plan, remove_plan, renew_plan, write_plan
from prep.cache.publish import sync_recent_directories
from prep.cache.records import Task
from prep.cache.store import Cache
from prep.digest import digest_bytes, digest_strings
from prep.encode.options import MOST_PARTS, SHARD_BYTES
from prep.encode.targets.records import Targets, by_first_sample
from prep.encode.text_groups import TextGroups
from prep.errors import UsageError
from prep.fs import atomic
from prep.fs.place import Place, is_directory
from prep.manifest.samples import in_table_order


class Wanted(Protocol):
    """Wanted rows, their sizes and groups: `ResolvedRecipe`, or less."""

    @property
    def targets(self) -> Targets: ...
    @property
    def text_groups(self) -> TextGroups | None: ...
    def group_of(self, field: str, key: str) -> tuple[int, int]: ...
    def row_bytes(self, field: str, key: str) -> int: ...


TASK_ROWS = 256  # at most: an interruption loses one task, some seconds on a GPU


DIGITS = 16  # hex digits of a key that decide its part: keys are digests, so they spread evenly


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class PlanPart:
    """One of several equal shares of a plan."""

    number: int  # from 0
    count: int

    def has(self, key: str) -> bool:
        """Whether the task (or row) with this key belongs to this part."""
        return part_of(key, self.count) == self

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def part_of(key: str, count: int) -> PlanPart:
    """The part of so many that a key belongs to."""
    return PlanPart(number=int(key[:DIGITS], 16) % count, count=count)


def parse_part(text: str) -> PlanPart:
    """The part that `I/N` names. Raises `UsageError`."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not match or not int(match[1]) < int(match[2]) <= MOST_PARTS:
        raise UsageError(f"--part is '{text}', expected I/N with I from 0 to N-1 and N at most {MOST_PARTS}",
                         hint="--part 0/4, --part 1/4, --part 2/4 and --part 3/4 share the work of four jobs")
    return PlanPart(number=int(match[1]), count=int(match[2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodePlan:
    """The wanted rows in the cache, and the tasks that make the missing rows."""

    ledger: Ledger
    refs: StoredRows  # places of the wanted rows in the cache
    tasks: tuple[Task, ...]  # not finished yet
    missing: dict[str, int]  # rows to encode, by field
    reused: dict[str, int]  # wanted rows in the cache, by field
    bytes: int  # of the missing rows
    digest: str  # of all wanted keys: the plan's name


def plan(resolved: Wanted, cache: Cache | None, *, shard_bytes: int = SHARD_BYTES, store: bool = True,
         retry: bool = False, part: PlanPart | None = None) -> EncodePlan:
    """The tasks to run: those of the stored plan if there is one; without a cache, all. With `part`, its tasks only.

    With `retry`, also those of rows rejected before. Only with `store` does this write: it stores the plan, and removes
    rejections of rows to retry and commits that are in the way.
    """
    digest = digest_strings(resolved.targets.keys())
    known = _Known(resolved, None if cache is None else read_plan(cache, digest))
    if part is not None and not store and known.stored is None:  # the plan that the first part will store
        whole = _compare_with_ledger(resolved, cache, shard_bytes, digest, known, remember=False, retry=retry).tasks
        known = _Known(resolved, whole, own=whole)
    if cache is None or not store:
        return _compare_with_ledger(resolved, cache, shard_bytes, digest, known, part, remember=False, retry=retry)
    if retry:
        forget_rejects(cache, frozenset(resolved.targets.keys()))
    if known.stored is not None:
        sync_recent_directories(cache)  # the process that followed it may have died
        renew_plan(cache, digest)  # before the ledger is loaded: whoever removes rows later sees it
    else:
        planned = _compare_with_ledger(resolved, cache, shard_bytes, digest, known)
        if not planned.tasks:
            return planned
        known = _Known(resolved, write_plan(cache, digest, planned.tasks), own=planned.tasks)
    # Another process may have finished a new plan, and removed it, after the first comparison.
    planned = _compare_with_ledger(resolved, cache, shard_bytes, digest, known, part)
    remove_foreign_commits(cache, planned.tasks)
    return planned


@dataclass(frozen=True, slots=True)
class _Known:
    """The tasks of the stored plan, if there is one."""

    resolved: Wanted
    stored: Iterable[Task] | None
    own: Sequence[Task] = ()  # what this process stored, unless another was quicker

    def tasks(self) -> Sequence[Task]:
        """Those that are valid; the tokens of missing text rows must have been counted."""
        return self.own if self.stored == self.own else tuple(_valid_tasks(self.resolved, self.stored or ()))


def _compare_with_ledger(resolved: Wanted, cache: Cache | None, shard_bytes: int, digest: str, known: _Known,
                         part: PlanPart | None = None, *, remember: bool = True, retry: bool = False) -> EncodePlan:
    """The wanted rows in the cache, and tasks for the missing rows; with `retry`, for rejected rows too."""
    ledger = empty_ledger() if cache is None else load_ledger(cache, remember=remember)
    there = ledger.resolve(resolved.targets.keys())
    by_field = resolved.targets.by_field()
    absent = {field: [key for key in names if key not in there] for field, names in by_field.items()}
    missing = {field: [key for key in names if retry or ledger.rejected(key) is None]
               for field, names in absent.items()}
    if resolved.text_groups is not None:
        resolved.text_groups.count(missing["text"])
    tasks = _divided(resolved, missing, known.tasks(), shard_bytes, part)
    return EncodePlan(
        ledger=ledger, refs=there, tasks=tasks, digest=digest,
        missing={field: sum(len(task.rows) for task in tasks if task.field == field) for field in by_field},
        reused={field: len(names) - len(absent[field]) for field, names in by_field.items()},
        bytes=_bytes_of(resolved, tasks),
    )


def _bytes_of(resolved: Wanted, tasks: Iterable[Task]) -> int:
    return sum(len(task.rows) * resolved.row_bytes(task.field, task.rows[0]) for task in tasks)


def drop_plan(cache: Cache, planned: EncodePlan, manifest: Place) -> None:
    """Removes the plan of a sealed manifest, once the manifest is on the disk: a killed run may not have synced it."""
    if cache.plan(planned.digest).exists():  # else nothing is written: the cache may be read-only
        if is_directory(folder := manifest.parent):
            atomic.sync_dir(folder)
        remove_plan(cache, planned.digest)


def _tasks(resolved: Wanted, missing: dict[str, list[str]], shard_bytes: int) -> list[Task]:
    """Tasks of one field and one shape, their rows sorted by key, in a fixed order.

    Samples that are neighbors in the manifest's table share shards, of each field: those who read a part of the table
    need a part of the shards.
    """
    tasks: list[Task] = []
    for field, names in missing.items():
        groups: dict[tuple[int, int], list[str]] = {}
        for key in by_first_sample(in_table_order(resolved.targets.samples), field, names) if names else ():
            groups.setdefault(resolved.group_of(field, key), []).append(key)
        for group in sorted(groups):
            most = rows_of_task(resolved.row_bytes(field, groups[group][0]), shard_bytes)
            tasks += [_task(field, sorted(rows)) for rows in _cut(groups[group], most)]
    return tasks


def rows_of_task(row_bytes: int, shard_bytes: int) -> int:
    """The most rows of so many bytes that a task has."""
    return min(TASK_ROWS, max(1, shard_bytes // row_bytes))


def _valid_tasks(resolved: Wanted, stored: Iterable[Task]) -> Iterator[Task]:
    """The tasks of a stored plan that are valid for these targets: rows of one field and shape, none of them twice.

    The cache is untrusted: no plan in it may get a row encoded as another field or shape.
    """
    # The keys of no task yet, to themselves: a task takes these strings, and those made from the plan are let go.
    free = {field: dict(zip(keys, keys, strict=True)) for field, keys in resolved.targets.by_field().items()}
    for task in stored:
        own = free.get(task.field, {})
        if all(key in own for key in task.rows) and len({resolved.group_of(task.field, key) for key in task.rows}) == 1:
            yield _task(task.field, [own.pop(key) for key in task.rows])


def parts_left(resolved: Wanted, cache: Cache, planned: EncodePlan, count: int) -> list[PlanPart]:
    """The parts, of so many, that have tasks of `planned` to do."""
    missing = {key for task in planned.tasks for key in task.rows}
    stored = list(_valid_tasks(resolved, read_plan(cache, planned.digest) or ())) or planned.tasks
    parts = {part_of(task.key, count) for task in stored if not missing.isdisjoint(task.rows)}
    return sorted(parts | {part_of(key, count) for key in missing - {key for task in stored for key in task.rows}})


def _divided(resolved: Wanted, missing: dict[str, list[str]], stored: Sequence[Task], shard_bytes: int,
             part: PlanPart | None) -> tuple[Task, ...]:
    """Tasks for the missing rows: those of the stored plan, and new ones for rows that it lacks, of a part if given.

    Rows that a stored plan lacks were in the cache when it was made, and lost since. What belongs to a part is decided
    by the keys of stored tasks, so that what is left of a partly finished one stays in its part; of lost rows, by those
    of the rows, because how they are divided into tasks depends on when one looks.
    """
    if not stored and part is None:
        return tuple(_tasks(resolved, missing, shard_bytes))
    unplanned = {key for names in missing.values() for key in names}
    remaining = list(_remaining(stored if part is None else [task for task in stored if part.has(task.key)], unplanned))
    for task in stored:
        unplanned.difference_update(task.rows)
    lost = {field: [key for key in names if key in unplanned and (part is None or part.has(key))] if unplanned else []
            for field, names in missing.items()}
    return (*remaining, *_tasks(resolved, lost, shard_bytes))


def _remaining(tasks: Sequence[Task], missing: set[str]) -> Iterator[Task]:
    """The missing part of `tasks`: unfinished tasks unchanged, and new tasks for the rest of partly finished ones.

    A task is partly finished only if some of its rows failed at the time, for example because of an unreadable file.
    """
    for task in tasks:
        rows = [key for key in task.rows if key in missing]
        if rows:
            yield task if len(rows) == len(task.rows) else _task(task.field, rows)


def _task(field: str, rows: Sequence[str]) -> Task:
    """The task of these rows. Its key is `digest_json` of kind, field and rows, spelled out: that takes a third."""
    spelled = '{"field":"' + field + '","kind":"task","rows":["' + '","'.join(rows) + '"]}'
    return Task(key=digest_bytes(spelled.encode("ascii")), field=field, rows=tuple(rows))


def _cut(keys: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    return (keys[start:start + most] for start in range(0, len(keys), most))
