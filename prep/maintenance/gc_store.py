"""Finds what no kept manifest needs in a cache in an object store, and removes it, as `sweep` does on a disk.

A store has no locks, so this stops for whoever else works there. An encoder that has something to encode has a plan in
the store until its manifest is written: with a plan, nothing is removed. Whoever writes a manifest looks afterwards
whether the store still has commits for all of its shards (`prep.encode.assemble.write_new`), and fails if not. Here
commits go first; then, again and again before shards go, kept manifests and plans are read again, and another one ends
it. So either the encoder sees that commits are gone, or this sees its manifest or plan, and leaves the shards.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event

from prep.cache.commits import MOST, Commit, parse_commit, read_commit
from prep.cache.ledger.columns import ordered
from prep.cache.plans import read_plan
from prep.cache.remote.documents import fetch_tables
from prep.cache.remote.shards import GROUP
from prep.cache.remote.working import JOBS, refresh
from prep.cache.store import SUFFIX, Cache
from prep.errors import CacheError
from prep.formatting import clock, join_texts
from prep.fs.remote.objects import Listed, delete_object, list_objects, read_object
from prep.fs.remote.retry import side_by_side
from prep.maintenance.sweep import ABANDONED, KINDS, SHORT, SHOWN, Needed, Sweep, made_any, named_plans
from prep.manifest.tables import SHARDS, read_table
from prep.parse import Unparsed, digest_of
from prep.progress import Tick

BATCH = 64  # shards that are removed before manifests and plans are read again
Objects = Mapping[str, Mapping[str, Mapping[str, Listed]]]  # by kind and digest: names below the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """What to remove and what to keep, and the objects of all of it."""

    sweep: Sweep
    objects: Objects


@dataclass(kw_only=True, slots=True)
class _Look:
    cache: Cache
    guard: float  # seconds
    now: float
    objects: Objects
    commits: Mapping[str, Commit | None]  # None: damaged
    young: dict[str, set[str]] = field(default_factory=dict)


def find_garbage_in_store(cache: Cache, needed: Needed, sizes: Mapping[str, int], *, guard: float,
                          abandon: Sequence[str] = ()) -> Garbage:
    """Finds what nobody needs; everything written less than `guard` seconds ago counts as needed, except the plans that
    `abandon` names by their first digits. `sizes`: bytes of the needed shards. `cache` is in a store.

    Raises `CacheError` if a needed shard is not whole, if there is another plan that may go on, or a commit of another
    version; `UsageError` if `abandon` names no plan; `StoreError`.
    """
    objects = _objects(cache)
    given_up = named_plans(str(cache.store), objects["plans"], abandon)
    for digest, size in sizes.items():
        files = objects["shards"].get(digest, {})
        if sum(one.size for one in files.values()) != size or f"{_place(digest)}/{GROUP}" not in files:
            raise CacheError(f"a kept manifest needs a shard that is not whole in the store, {digest} in "
                             f"{cache.store}: nothing was deleted", hint="to repair, run prep encode again as it was "
                             "first run; then run prep gc again")
    refresh(cache)
    at = _Look(cache=cache, guard=guard, now=time.time(), objects=objects, commits=_commits(cache, objects))
    at.young = {kind: {name for name in objects[kind] if guard > 0 and _age(at, kind, name) < guard} for kind in KINDS}
    living = {plan: age for plan in sorted(objects["plans"].keys() - given_up) if (age := _progress(at, plan)) < max(
        guard, ABANDONED)}
    if living:
        raise _unfinished(cache, living)
    shards = (set(needed.shards) | _young_shards(at, needed)) & objects["shards"].keys()
    stays: dict[str, set[str]] = {
        "commits": at.young["commits"] | {task for task, commit in at.commits.items() if _says(commit, shards)},
        "shards": shards, "tables": set(needed.tables) | at.young["tables"], "plans": at.young["plans"] - given_up,
        "damaged": set()}
    return Garbage(sweep=_sweep_of(at, stays, needed), objects=objects)


def _sweep_of(at: _Look, stays: Mapping[str, set[str]], needed: Needed) -> Sweep:
    def bytes_of(kind: str, names: Iterable[str]) -> int:
        return sum(one.size for name in names for one in at.objects[kind].get(name, {}).values())

    gone = {kind: tuple(sorted(at.objects[kind].keys() - stays[kind])) for kind in KINDS}
    commits = {task for task in stays["commits"] if not _says(at.commits.get(task), set(needed.shards))}
    return Sweep(remove=gone, keep={kind: tuple(sorted(stays[kind])) for kind in KINDS}, staging=0,
                 sizes={**{kind: bytes_of(kind, gone[kind]) for kind in KINDS}, "staging": 0},
                 kept_bytes=sum(bytes_of(kind, stays[kind]) for kind in KINDS),
                 guarded=len(stays["shards"] - needed.shards) + len(commits) + len(stays["tables"] - needed.tables)
                 + len(stays["plans"]))


def remove_from_store(cache: Cache, garbage: Garbage, unchanged: Callable[[], None], tick: Tick = lambda _: None
                      ) -> None:
    """Removes what was found: commits first, and of each shard the document without which it does not count.

    `unchanged` raises if somebody has begun to need something. After an interruption, what is left is found again.
    Raises `CacheError`.
    """
    gone = garbage.sweep.remove
    unchanged()
    _delete(cache, garbage, "commits", gone["commits"], tick)
    for start in range(0, len(gone["shards"]), BATCH):
        unchanged()
        _delete(cache, garbage, "shards", gone["shards"][start : start + BATCH], tick)
    unchanged()
    for kind in ("tables", "plans"):
        _delete(cache, garbage, kind, gone[kind], tick)


def check_no_plan(cache: Cache, garbage: Garbage) -> None:
    """Raises `CacheError` if the store has a plan besides those to remove, or a run has begun to follow one of them."""
    there, known = _objects(cache, "plans")["plans"], garbage.objects["plans"]
    if new := sorted(plan for plan in there if plan not in garbage.sweep.remove["plans"] or there[plan] != known[plan]):
        raise _unfinished(cache, dict.fromkeys(new, 0.0))


def _delete(cache: Cache, garbage: Garbage, kind: str, names: Iterable[str], tick: Tick) -> None:
    found = [(name, one) for name in names for one in garbage.objects[kind][name]]
    first = [(name, one) for name, one in found if kind == "shards" and one == f"{_place(name)}/{GROUP}"]
    for part in (first, sorted(set(found) - set(first))):
        stop = Event()

        def delete(named: tuple[str, str], stop: Event = stop) -> None:
            delete_object(f"{cache.store}/{named[1]}", stop=stop)

        side_by_side(delete, part, JOBS, stop)
    tick(len({name for name, _ in found}))


def _objects(cache: Cache, below: str = "") -> Objects:
    """The objects of the cache by kind and digest; other objects are nobody's here, and stay."""
    found: dict[str, dict[str, dict[str, Listed]]] = {kind: defaultdict(dict) for kind in KINDS}
    start = f"{below}/" if below else ""
    for name, one in list_objects(f"{cache.store}/{below}".rstrip("/")).items():
        kind, _, rest = f"{start}{name}".partition("/")
        parts = rest.split("/")
        with suppress(Unparsed, IndexError):
            if kind == "shards":
                digest = digest_of(parts[1], kind)
                fits = rest.startswith(f"{digest[:2]}/{digest}/")
            elif kind in SUFFIX and kind != "damaged":
                digest = digest_of(parts[-1].removesuffix(SUFFIX[kind]), kind)
                path = cache.root / kind / (parts[-1] if kind == "plans" else f"{digest[:2]}/{parts[-1]}")
                fits = f"{start}{name}" == path.relative_to(cache.root).as_posix() and parts[-1].endswith(SUFFIX[kind])
            else:
                continue
            if fits:
                found[kind][digest][f"{start}{name}"] = one
    return found


def _place(digest: str) -> str:
    return f"shards/{digest[:2]}/{digest}"


def _commits(cache: Cache, objects: Objects) -> dict[str, Commit | None]:
    """The commits of the store; `None` for a damaged one."""
    stop = Event()

    def read(task: str) -> Commit | None:
        found = read_commit(cache, task)
        if found is not None:
            return found
        (name,) = objects["commits"][task]
        with suppress(Unparsed, FileNotFoundError):
            return parse_commit(read_object(f"{cache.store}/{name}", MOST, stop=stop), task, name)
        return None

    tasks = sorted(objects["commits"])
    return dict(zip(tasks, side_by_side(read, tasks, JOBS, stop), strict=True))


def _age(at: _Look, kind: str, name: str) -> float:
    """Seconds since the last of its objects was written."""
    return at.now - max(one.written for one in at.objects[kind][name].values())


def _progress(at: _Look, plan: str) -> float:
    """Seconds since a plan was made or followed, or rows of it were made; infinity for a damaged one."""
    stored = read_plan(at.cache, plan)
    if stored is None:
        return float("inf")
    ages = {task: _age(at, "commits", task) for task in at.commits}
    age = min([_age(at, "plans", plan), *(ages[key] for key in stored.task_keys() if key in ages)])
    rows = ordered(stored.row)
    newer = sorted((task for task in ages if ages[task] < age), key=ages.__getitem__)
    return next((ages[task] for task in newer if made_any(at.cache, at.commits[task], rows)), age)


def _unfinished(cache: Cache, plans: Mapping[str, float]) -> CacheError:
    """The error for plans, with the seconds since the last progress of each."""
    named = join_texts([f"plan {plan[:SHORT]}, last progress {clock(max(age, 0))} ago" for plan, age in plans.items()],
                       SHOWN)
    return CacheError(f"{cache.store} has encodes that go on or were interrupted, so nothing is removed: {named}",
                      hint="let them finish: prep encode, or prep seal, removes its plan once the manifest is written; "
                      "one that nobody can finish, because captions, pictures or options have changed since, is given "
                      f"up by {' '.join(f'--abandon {plan[:SHORT]}' for plan in list(plans)[:SHOWN])}; without "
                      "progress for 7 days it counts as abandoned")


def _says(commit: Commit | None, shards: set[str]) -> bool:
    """Whether a commit is still useful: intact, and its shard, if any, is kept."""
    return commit is not None and (commit.shard is None or commit.shard.digest in shards)


def _young_shards(at: _Look, needed: Needed) -> set[str]:
    """Shards that are young, or named by a young commit or a young shards table."""
    found = set(at.young["shards"])
    for task in at.young["commits"]:
        commit = at.commits[task]
        found |= {commit.shard.digest} if commit is not None and commit.shard is not None else set()
    for digest in at.young["tables"] - needed.tables:
        with suppress(CacheError):  # damaged, or another kind of table
            fetch_tables(at.cache.place, [digest])
            found |= {name.as_py().hex() for name in read_table(at.cache, digest, SHARDS)["digest"]}
    return found
