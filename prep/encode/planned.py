"""Plans the rows of a cache that is in use: what earlier runs left there is repaired first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from prep.cache.publish import clear_leftovers, leftovers
from prep.cache.store import Cache
from prep.encode.options import EncodeOptions
from prep.encode.plan import EncodePlan, PlanPart, Wanted, plan
from prep.errors import CacheError
from prep.fs.lock import PATIENCE, lock_directory
from prep.maintenance.repair import adopt_orphans, damaged_shards, incomplete_commits, repair_commits, salvage
from prep.progress import Progress, phase


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows that a command wants of a cache, and how it plans them."""

    rows: Wanted
    options: EncodeOptions
    progress: Progress
    part: PlanPart | None = None  # the share of the plan; None: all of it


def clean_up(cache: Cache) -> None:
    """Clears leftovers and salvages damaged shards, unless another process is using the cache."""
    damaged = damaged_shards(cache)
    if not damaged and not leftovers(cache.unsent):
        return
    with suppress(CacheError), lock_directory(cache.root, exclusive=True):
        clear_leftovers(cache.unsent)
        for shard in damaged:
            salvage(cache, shard)


@contextmanager
def planned_rows(wanted: WantedRows, cache: Cache) -> Iterator[EncodePlan]:
    """Yields the plan and holds the cache's lock meanwhile, shared with other encoders; gc locks exclusively.

    Incomplete commits are repaired first, under a short exclusive lock. If others use the cache, or this encodes a part
    and others probably will, the repair is left for later, and the rows are encoded again.
    """
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        planned = _plan(wanted, cache)
        ill = incomplete_commits(cache, planned.ledger) if wanted.part is None else []
        if not ill:
            yield planned
            return
    with suppress(CacheError), lock_directory(cache.root, exclusive=True):
        repair_commits(cache, ill)
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        yield _plan(wanted, cache)


def _plan(wanted: WantedRows, cache: Cache) -> EncodePlan:
    """The plan, after intact shards that only lack a commit have received one."""
    options = wanted.options

    def planned() -> EncodePlan:
        with phase(wanted.progress, "looking up rows"):
            return plan(wanted.rows, cache, shard_bytes=options.shard_bytes, retry=options.retry_rejects,
                        part=wanted.part)

    first = planned()
    missing = {key for task in first.tasks for key in task.rows}
    return planned() if missing and adopt_orphans(cache, first.ledger, missing, wanted.progress) else first
