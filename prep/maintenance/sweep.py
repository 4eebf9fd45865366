"""Finds what no kept manifest needs in a cache, on a disk or in a store.

Needed is what kept manifests name, what unfinished plans refer to, and everything young: the finished work of an
interrupted encode, or of a recent manifest that was not named. Commits without a shard only list rows that cannot be
encoded; they are kept.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from prep.cache.commits import MOST, Commit, checked_commit, parse_commit
from prep.cache.ledger.columns import KEY, Column, among, ordered, packed
from prep.cache.plans import read_plan
from prep.cache.remote.documents import fetch_tables
from prep.cache.remote.stored import JOBS, refresh
from prep.cache.shard_header import read_keys
from prep.cache.store import Cache
from prep.errors import CacheError, UsageError
from prep.formatting import clock, join_names, join_texts
from prep.fs.remote.objects import read_object
from prep.fs.remote.retry import side_by_side
from prep.fs.untrusted import NotRegularFile
from prep.maintenance.stock import KINDS, Things, group_of, stock_of
from prep.manifest.tables import SHARDS, read_table
from prep.parse import Unparsed

ABANDONED = 7 * 86400.0  # seconds without progress after which a plan counts as abandoned
SHOWN = 8  # plans in a message
SHORT = 12  # digits of a plan's digest by which messages name it
MEND = "to repair, run prep encode again as it was first run; then run prep gc again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """What kept manifests name."""

    shards: Mapping[str, tuple[int, str]]  # bytes, and the manifest, by digest
    tables: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What to remove and what to keep, at the time of the search."""

    things: Things
    remove: Mapping[str, tuple[str, ...]]  # digests by kind, sorted
    keep: Mapping[str, tuple[str, ...]]
    guarded: int  # objects kept only because they are young

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes to free, by kind and for staging."""
        return {**{kind: self._bytes(kind, self.remove[kind]) for kind in KINDS},
                "staging": self._bytes("staging", self.things["staging"])}

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(self._bytes(kind, self.keep[kind]) for kind in KINDS)

    @property
    def staging(self) -> int:
        """The number of leftovers in tmp/."""
        return len(self.things["staging"])

    def _bytes(self, kind: str, names: Iterable[str]) -> int:
        return sum(self.things[kind][name].bytes for name in names if name in self.things[kind])


@dataclass(kw_only=True, slots=True)
class _Look:
    """The state of the cache during the search."""

    cache: Cache
    guard: float  # seconds
    now: float
    things: Things
    commits: Mapping[str, Commit | None]  # None: damaged
    young: dict[str, set[str]] = field(default_factory=dict)

    def age(self, kind: str, name: str) -> float:
        """Seconds since a thing was written."""
        return self.now - self.things[kind][name].written


def find_garbage(cache: Cache, needed: Needed, *, guard: float, abandon: Sequence[str] = ()) -> Sweep:
    """Finds what nobody needs; everything written less than `guard` seconds ago counts as needed, except the plans that
    `abandon` names by their first digits.

    Raises `CacheError` if a needed shard is not whole, for a commit of another version, which this version cannot
    interpret, if something cannot be read, because it may state what is needed, and in a store, which has no locks, if
    a plan may go on; `UsageError` if `abandon` names no plan.
    """
    things = stock_of(cache).things()
    given_up = _named_plans(str(cache.place), things["plans"], abandon)
    _require_whole(things, needed)
    refresh(cache)
    at = _Look(cache=cache, guard=guard, now=time.time(), things=things, commits=_commits(cache, things))
    at.young = {kind: {name for name in things[kind] if guard > 0 and at.age(kind, name) < guard} for kind in KINDS}
    plans = _living_plans(at, given_up)
    if plans and not cache.has_lock:
        raise _unfinished(cache, {plan: _latest(at, age, rows) for plan, (age, rows) in plans.items()})
    firm = set(needed.shards) | _shards_of_plans(at, [rows for _, rows in plans.values()], needed.shards)
    shards = (firm | _young_shards(at, needed)) & things["shards"].keys()
    stays: dict[str, set[str]] = {
        "commits": at.young["commits"] | {task for task, commit in at.commits.items() if _says(commit, shards)},
        "shards": shards,
        "tables": at.young["tables"] | (things["tables"].keys() & needed.tables),
        "plans": (set(plans) | at.young["plans"]) - given_up,
        "damaged": things["damaged"].keys() & shards,
    }
    return Sweep(things=things, remove={kind: tuple(sorted(things[kind].keys() - stays[kind])) for kind in KINDS},
                 keep={kind: tuple(sorted(stays[kind])) for kind in KINDS},
                 guarded=_guarded(at, stays, firm, needed, plans))


def _named_plans(where: str, plans: Collection[str], named: Iterable[str]) -> set[str]:
    """The plans that somebody named by their first digits, eight or more.

    Raises `UsageError` if one of the names is not that of exactly one plan.
    """
    chosen = set()
    for name in named:
        fits = [plan for plan in plans if plan.startswith(name)] if re.fullmatch("[0-9a-f]{8,64}", name) else []
        if len(fits) != 1:
            known = join_names([plan[:SHORT] for plan in sorted(plans)], SHOWN) or "it has none"
            raise UsageError(f"--abandon is '{name}', expected a plan of {where}: {known}",
                             hint="name it by its first 8 digits or more; a plan that is gone needs no --abandon")
        chosen.add(fits[0])
    return chosen


def check_no_plan(cache: Cache, sweep: Sweep) -> None:
    """Raises `CacheError` if a store has a plan besides those to remove, or a run has begun to follow one of them."""
    stored, known = stock_of(cache).plans(), sweep.things["plans"]
    if new := sorted(plan for plan in stored if plan not in sweep.remove["plans"] or stored[plan] != known[plan]):
        raise _unfinished(cache, dict.fromkeys(new, 0.0))


def _unfinished(cache: Cache, plans: Mapping[str, float]) -> CacheError:
    """The error for plans, with the seconds since the last progress of each."""
    named = join_texts([f"plan {plan[:SHORT]}, last progress {clock(max(age, 0))} ago" for plan, age in plans.items()],
                       SHOWN)
    return CacheError(f"{cache.place} has encodes that go on or were interrupted, so nothing is removed: {named}",
                      hint="let them finish: prep encode, or prep seal, removes its plan once the manifest is written; "
                      "one that nobody can finish, because captions, pictures or options have changed since, is given "
                      f"up by {' '.join(f'--abandon {plan[:SHORT]}' for plan in list(plans)[:SHOWN])}; without "
                      "progress for 7 days it counts as abandoned")


def _require_whole(things: Things, needed: Needed) -> None:
    """Raises unless every needed shard has its full size: otherwise its rows may be in shards that no manifest names
    yet."""
    for digest, (size, manifest) in needed.shards.items():
        thing = things["shards"].get(digest)
        if thing is None or (thing.objects and group_of(digest) not in thing.objects):
            raise CacheError(f"{manifest} needs shard {digest}, which is missing, so nothing is removed", hint=MEND)
        if thing.bytes != size:
            raise CacheError(f"{manifest} needs shard {digest} of {size} bytes, which has {thing.bytes}, so nothing is "
                             "removed", hint=MEND)


def _commits(cache: Cache, things: Things) -> dict[str, Commit | None]:
    """All commits; `None` for a damaged one. Raises `OSError` if this user may not read one."""
    stop = Event()

    def read(task: str) -> Commit | None:
        with contextlib.suppress(FileNotFoundError, NotRegularFile, Unparsed):
            return checked_commit(cache, task)
        for name in things["commits"][task].objects:  # whose shard is not whole there, so it is not known here
            with contextlib.suppress(FileNotFoundError, Unparsed):
                return parse_commit(read_object(f"{cache.store}/{name}", MOST, stop=stop), task, name)
        return None

    tasks = sorted(things["commits"])
    return dict(zip(tasks, side_by_side(read, tasks, JOBS, stop), strict=True))


def _says(commit: Commit | None, shards: Collection[str]) -> bool:
    """Whether a commit is still useful: intact, and its shard, if any, is kept."""
    return commit is not None and (commit.shard is None or commit.shard.digest in shards)


def _living_plans(at: _Look, given_up: Collection[str]) -> dict[str, tuple[float, Column]]:
    """Each plan that may still be continued: a time in seconds within which there was progress, and its rows (S32,
    sorted)."""
    living: dict[str, tuple[float, Column]] = {}
    limit = max(at.guard, ABANDONED)
    for name in sorted(at.things["plans"].keys() - given_up):
        plan = read_plan(at.cache, name)
        if plan is None:
            continue
        rows = ordered(plan.row)
        age = min([at.age("plans", name), *(at.age("commits", key) for key in plan.task_keys() if key in at.commits)])
        if age >= limit:
            age = _latest(at, limit, rows)
        if age < limit:
            living[name] = age, rows
    return living


def _latest(at: _Look, age: float, rows: Column) -> float:
    """Seconds since the last commit, younger than `age`, that made or rejected any of these rows; else `age`."""
    ages = {task: at.age("commits", task) for task in at.commits}
    newer = sorted((task for task in ages if ages[task] < age), key=ages.__getitem__)
    return next((ages[task] for task in newer if _made_any(at.cache, at.commits[task], rows)), age)


def _made_any(cache: Cache, commit: Commit | None, rows: Column) -> bool:
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


def _shards_of_plans(at: _Look, plans: Sequence[Column], known: Collection[str]) -> set[str]:
    """Shards other than `known` that hold a row of a living plan."""
    if not plans:
        return set()
    wanted = ordered(np.concatenate(plans))
    shards = set()
    for shard in at.things["shards"].keys() - known:
        with contextlib.suppress(CacheError):  # damaged: nobody can use its rows
            if among(wanted, read_keys(at.cache, shard).view(KEY).reshape(-1)).any():
                shards.add(shard)
    return shards


def _young_shards(at: _Look, needed: Needed) -> set[str]:
    """Shards that are young, or named by a young commit or a young shards table."""
    shards = set(at.young["shards"])
    for task in at.young["commits"]:
        commit = at.commits[task]
        shards |= {commit.shard.digest} if commit is not None and commit.shard is not None else set()
    for digest in at.young["tables"] - needed.tables:
        with contextlib.suppress(CacheError):  # damaged, or another kind of table
            fetch_tables(at.cache.place, [digest])
            shards |= {name.as_py().hex() for name in read_table(at.cache, digest, SHARDS)["digest"]}
    return shards


def _guarded(at: _Look, stays: Mapping[str, set[str]], firm: set[str], needed: Needed, plans: Iterable[str]) -> int:
    """The number of objects that are kept although neither a manifest nor a plan needs them."""
    commits = {task for task in stays["commits"] if not _says(at.commits[task], firm)}
    return (len(stays["shards"] - firm) + len(commits) + len(stays["tables"] - needed.tables)
            + len(stays["plans"].difference(plans)))
