"""Counts the rows that re-encoding would make, by the plan of `prep encode --dry-run`: those whose keys the cache
lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prep.cache.remote.opening import is_cache, open_to_encode
from prep.encode.options import EncodeOptions
from prep.encode.plan import plan
from prep.encode.prepare import EncodeCall, prepare
from prep.fs.memo import dry_run
from prep.fs.place import Place
from prep.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Rows by field."""

    new: Mapping[str, int]
    reused: Mapping[str, int]


def cost_of(recipe: Recipe, cache: Place, *, jobs: int) -> Cost:
    """The rows that encoding a recipe into a cache would make now; encodes and writes nothing. Raises `Problem`."""
    call = EncodeCall(recipe=recipe, cache=cache, output=cache.with_name(f"{cache.name}.json"),
                      options=EncodeOptions(jobs=jobs, dry_run=True))
    with dry_run():
        wanted = prepare(call).resolved
        planned = plan(wanted, open_to_encode(cache, create=False) if is_cache(cache) else None, store=False)
    return Cost(new=planned.missing, reused=planned.reused)
