"""Finds what no kept manifest needs, and removes it: commits before shards, shards renamed before deleted.

Needed is what kept manifests name, what unfinished plans refer to, and everything young: the finished work of an
interrupted encode, or of a recent manifest that was not named. Commits without a shard only list rows that cannot be
encoded; they are kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from prep.cache.commits import Commit, checked_commit
from prep.cache.ledger.columns import KEY, Column, among, ordered, packed
from prep.cache.ledger.index import drop_index
from prep.cache.plans import read_plan
from prep.cache.shard_header import read_keys
from prep.cache.store import FANNED, Cache, clear_leftovers, leftovers, retire_shard
from prep.errors import CacheError, UsageError
from prep.formatting import join_names
from prep.fs import atomic
from prep.fs.untrusted import NotRegularFile, is_link
from prep.manifest.tables import SHARDS, read_table
from prep.parse import Unparsed
from prep.progress import Tick

ABANDONED = 7 * 86400.0  # seconds without progress after which a plan counts as abandoned
SHOWN = 8  # plans in a message
SHORT = 12  # digits of a plan's digest by which messages name it
KINDS = ("commits", "shards", "tables", "plans", "damaged")  # in order of removal; staging comes last


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """The digests that kept manifests name."""

    shards: frozenset[str]
    tables: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What to remove and what to keep, at the time of the search."""

    remove: Mapping[str, tuple[str, ...]]  # digests by kind, sorted
    keep: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]  # bytes to free, by kind and for staging
    kept_bytes: int
    staging: int  # leftovers in tmp/
    guarded: int  # objects kept only because they are young


@dataclass(kw_only=True, slots=True)
class _Look:
    """The state of the cache during the search."""

    cache: Cache
    guard: float  # seconds
    now: float
    found: dict[str, list[str]]
    commits: Mapping[str, Commit | None]  # None: damaged
    young: dict[str, set[str]] = field(default_factory=dict)


def find_garbage(cache: Cache, needed: Needed, *, guard: float, abandon: Sequence[str] = ()) -> Sweep:
    """Finds what nobody needs; everything written less than `guard` seconds ago counts as needed, except the plans that
    `abandon` names by their first digits.

    Raises `CacheError` for a commit of another version, which this version cannot interpret, and if something
    cannot be read, because it may state what is needed; `UsageError` if `abandon` names no plan.
    """
    _require_all_seen(cache)
    found = {kind: list(_names(cache, kind)) for kind in KINDS}
    given_up = named_plans(str(cache.root), found["plans"], abandon)
    at = _Look(cache=cache, guard=guard, now=time.time(), found=found,
               commits={task: _commit(cache, task) for task in found["commits"]})
    at.young = {kind: {name for name in found[kind] if _is_young(at, _path(cache, kind, name))} for kind in KINDS}
    plans = _living_plans(at, given_up)
    firm = set(needed.shards) | _shards_of_plans(at, plans, needed.shards)
    shards = (firm | _young_shards(at, needed)) & set(found["shards"])
    stays: dict[str, set[str]] = {
        "commits": at.young["commits"] | {task for task, commit in at.commits.items() if _says(commit, shards)},
        "shards": shards,
        "tables": (set(needed.tables) & set(found["tables"])) | at.young["tables"],
        "plans": (set(plans) | at.young["plans"]) - given_up,
        "damaged": set(found["damaged"]) & shards,
    }
    gone = {kind: tuple(name for name in found[kind] if name not in stays[kind]) for kind in KINDS}
    left = leftovers(cache)
    return Sweep(
        remove=gone, keep={kind: tuple(sorted(stays[kind])) for kind in KINDS}, staging=len(left),
        sizes={**{kind: _bytes(_path(cache, kind, name) for name in gone[kind]) for kind in KINDS},
               "staging": _bytes(left)},
        kept_bytes=sum(_bytes(_path(cache, kind, name) for name in stays[kind]) for kind in KINDS),
        guarded=_guarded(at, stays, firm, needed, plans),
    )


def named_plans(where: str, plans: Collection[str], named: Iterable[str]) -> set[str]:
    """The plans that somebody named by their first digits, eight or more.

    Raises `UsageError` if one of the names is not that of exactly one plan.
    """
    found = set()
    for name in named:
        fits = [plan for plan in plans if plan.startswith(name)] if re.fullmatch("[0-9a-f]{8,64}", name) else []
        if len(fits) != 1:
            there = join_names([plan[:SHORT] for plan in sorted(plans)], SHOWN) or "it has none"
            raise UsageError(f"--abandon is '{name}', expected a plan of {where}: {there}",
                             hint="name it by its first 8 digits or more; a plan that is gone needs no --abandon")
        found.add(fits[0])
    return found


def remove(cache: Cache, sweep: Sweep, tick: Tick = lambda _: None) -> None:
    """Removes what `find_garbage` found, and leftovers; calls `tick(1)` for each. Needs the exclusive lock.

    Needs no space on the disk. After a crash, everything needed is intact, and some garbage may remain.
    """
    if any(sweep.remove.values()):
        drop_index(cache)
    for kind in KINDS:
        for name in sweep.remove[kind]:
            if kind == "shards":
                retire_shard(cache, name)
            else:
                atomic.remove_tree(cache.file(kind, name))
            tick(1)
        for parent in sorted({_path(cache, kind, name).parent for name in sweep.remove[kind]}):
            atomic.sync_dir(parent)
    clear_leftovers(cache)


def _require_all_seen(cache: Cache) -> None:
    for kind in ("shards", *sorted(FANNED)):
        for folder in cache.closed(kind):
            raise CacheError(f"{folder} cannot be listed (no permission), so nothing is removed",
                             hint="run prep gc as a user with read and write access to the whole cache")


def _names(cache: Cache, kind: str) -> Iterator[str]:
    """The digests of a kind whose files are at their proper paths."""
    every = cache.shards() if kind == "shards" else cache.names(kind)
    return (name for name in every if _path(cache, kind, name).exists())


def _commit(cache: Cache, task: str) -> Commit | None:
    """The commit; `None` if it is damaged. Raises `OSError` if this user may not read it."""
    try:
        return checked_commit(cache, task)
    except (FileNotFoundError, NotRegularFile, Unparsed):
        return None


def _path(cache: Cache, kind: str, name: str) -> Path:
    return cache.shard(name) if kind == "shards" else cache.file(kind, name)


def _written(path: Path) -> float:
    """When a file, or a shard's last file, was written; infinity if that is not known."""
    try:
        inner = path / "zarr.json"
        return max(path.stat().st_mtime, inner.stat().st_mtime if inner.exists() else 0)
    except OSError:
        return float("inf")


def _is_young(at: _Look, path: Path) -> bool:
    return at.guard > 0 and at.now - _written(path) < at.guard


def _says(commit: Commit | None, shards: set[str]) -> bool:
    """Whether a commit is still useful: intact, and its shard, if any, is kept."""
    return commit is not None and (commit.shard is None or commit.shard.digest in shards)


def _living_plans(at: _Look, given_up: Collection[str]) -> dict[str, Column]:
    """The rows (S32, sorted) of each plan that may still be continued, by digest."""
    living: dict[str, Column] = {}
    limit = max(at.guard, ABANDONED)
    recent = {task: commit for task, commit in at.commits.items() if at.now - _written(at.cache.commit(task)) < limit}
    for name in set(at.found["plans"]).difference(given_up):
        plan = read_plan(at.cache, name)
        if plan is None:
            continue
        rows = ordered(plan.row)
        if (at.now - _written(at.cache.plan(name)) < limit or any(key in recent for key in plan.task_keys())
                or any(made_any(at.cache, commit, rows) for commit in recent.values())):
            living[name] = rows
    return living


def made_any(cache: Cache, commit: Commit | None, rows: Column) -> bool:
    """Whether a commit made or rejected any of these rows, which are sorted.

    Then it is progress of their plan, whose tasks do not name all of its commits: what is left of a partly finished
    task is a task of its own, and so are rows that were lost.
    """
    if commit is None:
        return False
    if among(rows, packed(reject.key for reject in commit.rejects)).any():
        return True
    with contextlib.suppress(CacheError):  # its shard is damaged or missing: nobody can use its rows
        return commit.shard is not None and bool(
            among(rows, read_keys(cache, commit.shard.digest).view(KEY).reshape(-1)).any())
    return False


def _shards_of_plans(at: _Look, plans: Mapping[str, Column], known: Iterable[str]) -> set[str]:
    """Shards other than `known` that hold a row of a living plan."""
    if not plans:
        return set()
    wanted = ordered(np.concatenate(list(plans.values())))
    found = set()
    for shard in set(at.found["shards"]).difference(known):
        with contextlib.suppress(CacheError):  # damaged: nobody can use its rows
            if among(wanted, read_keys(at.cache, shard).view(KEY).reshape(-1)).any():
                found.add(shard)
    return found


def _young_shards(at: _Look, needed: Needed) -> set[str]:
    """Shards that are young, or named by a young commit or a young shards table."""
    found = set(at.young["shards"])
    for task in at.young["commits"]:
        commit = at.commits[task]
        found |= {commit.shard.digest} if commit is not None and commit.shard is not None else set()
    for digest in at.young["tables"] - needed.tables:
        with contextlib.suppress(CacheError):  # damaged, or another kind of table
            found |= {name.as_py().hex() for name in read_table(at.cache, digest, SHARDS)["digest"]}
    return found


def _guarded(at: _Look, stays: Mapping[str, set[str]], firm: set[str], needed: Needed, plans: Iterable[str]) -> int:
    """The number of objects that are kept although neither a manifest nor a plan needs them."""
    commits = {task for task in stays["commits"] if not _says(at.commits[task], firm)}
    return (len(stays["shards"] - firm) + len(commits) + len(stays["tables"] - needed.tables)
            + len(stays["plans"].difference(plans)))


def _bytes(paths: Iterable[Path]) -> int:
    """Total bytes of files and directory trees; does not follow links, and counts what cannot be read as 0."""
    total, left = 0, list(paths)
    while left:
        path = left.pop()
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and not is_link(status):
                with os.scandir(path) as found:
                    left += [Path(entry.path) for entry in found]
            else:
                total += status.st_size
    return total
