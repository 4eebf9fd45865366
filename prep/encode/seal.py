"""Runs `prep seal`: writes the manifest once all parts of a job array are encoded, or says what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from prep.cache.plans import plans_of
from prep.cache.remote.opening import open_to_encode
from prep.cache.store import Cache
from prep.encode.engines.job import Outcome
from prep.encode.plan import EncodePlan, parts_left, plan
from prep.encode.prepare import EncodeCall, Prepared, prepare
from prep.encode.report import EncodeReport
from prep.encode.run import write_manifest
from prep.errors import CacheError
from prep.formatting import counted, grouped, join_names
from prep.fs.lock import PATIENCE, lock_directory
from prep.manifest.commands import command_of
from prep.runtime import gc_disabled

SHOWN = 4  # parts and commands in a message


@gc_disabled()
def run_seal(call: EncodeCall, count: int | None) -> EncodeReport:
    """Writes the manifest of a cache that has all rows; encodes nothing. `count` is the number of parts, if known.

    Raises `CacheError` if rows are missing, and what `run_encode` raises.
    """
    ready = prepare(call)
    cache = open_to_encode(call.cache, create=False)
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        planned = plan(ready.resolved, cache, shard_bytes=call.options.shard_bytes, store=False)
        if planned.tasks:
            _refuse(ready, cache, planned, count)
        report = write_manifest(ready, cache, planned, Outcome(encoded={}, transient=()))
    ready.begun.facts.save()
    return replace(report, truncated=ready.truncated)


def _refuse(ready: Prepared, cache: Cache, planned: EncodePlan, count: int | None) -> NoReturn:
    """Raises `CacheError`: what is missing, which parts have it to do, and their commands."""
    rows = ", ".join(f"{grouped(rows)} {field}" for field, rows in planned.missing.items() if rows)
    parts = [] if count is None else parts_left(ready.resolved, cache, planned, count)
    which = f"; parts with work left: {join_names([str(part) for part in parts], SHOWN)}" if parts else ""
    others = len(plans_of(cache).keys() - {planned.digest})
    other = (f"; {counted(others, 'plan')} of other rows: parts with other options or of another version, or from "
             "before a picture changed, encode other rows" if others else "")
    command = command_of(ready.call.recipe.file or ready.call.recipe.sources[0].path, ready.call.recipe.options,
                         ready.call.cache, ready.call.output)
    commands = [f"{command} --part {part}" for part in parts[:SHOWN]] or [command]
    raise CacheError(f"rows are missing in {cache.place}: {rows}{which}{other}",
                     hint=f"encode them, then seal again: {'; '.join(commands)}")
