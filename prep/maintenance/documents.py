"""Checks commits, plans and damage records, alone and against a manifest's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prep.cache.commits import checked_commit
from prep.cache.damage import record_fault
from prep.cache.plans import read_plan
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.parse import Unparsed

Facts = Mapping[str, Any]  # of a shard, from a manifest: field, rows, bytes


@dataclass(kw_only=True, slots=True)
class Checkup:
    """Damage and notes, as texts."""

    damaged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # no loss for this manifest: hints, faults of other data sets


def check_up(cache: Cache, shards: Mapping[str, Facts] | None) -> Checkup:
    """Checks every commit and plan of a cache; `shards` are the manifest's shards by digest, None if unknown."""
    checkup = Checkup()
    unnamed = set(shards or ()) - set(_check_commits(cache, shards, checkup))
    checkup.notes += [f"shard {digest} has no intact commit; prep encode writes one" for digest in sorted(unnamed)
                      if _is_there(cache, digest)]
    checkup.notes += [f"plan {name} is damaged; prep encode makes it again" for name in cache.names("plans")
                      if read_plan(cache, name) is None and cache.plan(name).exists()]
    return checkup


def notes_on_damage_records(cache: Cache) -> list[str]:
    """Notes on damage records that are damaged themselves; verifying an intact shard removes its record."""
    return [f"the damage record of shard {digest} is damaged itself ({what}); prep encode checks that shard"
            for digest in cache.names("damaged") if (what := record_fault(cache, digest))]


def _check_commits(cache: Cache, shards: Mapping[str, Facts] | None, checkup: Checkup) -> Iterator[str]:
    """Checks every commit; yields the shards that intact commits name."""
    for task in cache.names("commits"):
        try:
            commit = checked_commit(cache, task)
        except CacheError as error:
            checkup.damaged.append(error.message)
            continue
        except (OSError, Unparsed) as error:
            if cache.commit(task).exists():  # otherwise removed meanwhile, with its shard
                checkup.damaged.append(f"commit {task}: {error}")
            continue
        if commit.shard is None:
            continue
        yield commit.shard.digest
        facts = None if shards is None else shards.get(commit.shard.digest)
        if facts is None:
            if not _is_there(cache, commit.shard.digest):
                needed = "perhaps this manifest needs it" if shards is None else "this manifest does not need it"
                checkup.notes.append(f"commit {task} names shard {commit.shard.digest}, which is missing; {needed}")
        elif (commit.field, commit.shard.rows, commit.shard.bytes) != (facts["field"], facts["rows"], facts["bytes"]):
            checkup.damaged.append(
                f"commit {task}: {commit.shard.rows} {commit.field} rows in {commit.shard.bytes} bytes, expected "
                f"{facts['rows']} {facts['field']} rows in {facts['bytes']} bytes of shard {commit.shard.digest}")


def _is_there(cache: Cache, shard: str) -> bool:
    try:
        return cache.shard(shard).exists()
    except CacheError:  # its directory was replaced by something else, which verify reports
        return False
