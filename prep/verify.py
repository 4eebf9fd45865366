"""Is every byte that a manifest needs still what it was, and does every row belong to its sample? Behind `prep verify`.

Damage is named with the samples that need it, and with what its repair costs: rows to be encoded again, by field.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from prep.audit import Audit
from prep.cache.damage import Damage, recorded
from prep.cache.ledger import shard_bytes
from prep.cache.reader import Reader
from prep.cache.verify import verify_shard
from prep.errors import CacheError
from prep.keys import text_key, unconditional_key

Place = tuple[int, int]  # (number of the shard, row)
WRONG_ROW = "its key is not the one of this sample: the manifest's tables and its shards do not belong together"


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Who needs a row."""

    who: str  # a sample's name, or what the manifest itself needs it for
    key: str | None  # a text row's key, recomputed; None for pictures: their colour and mask files are not known here


def verify(audit: Audit, *, quick: bool = False, tick: Callable[[int], object] = lambda _: None) -> dict[str, Any]:
    """The document of `prep verify --json`; calls `tick(1)` for each shard.

    `quick` compares sizes instead of bytes and keys, and repeats the damage remembered by readers. Damage is data here:
    nothing is raised for it.
    """
    damaged = _damaged_tables(audit)
    broken = {one["field"] for one in damaged}
    uses = {} if broken & {"samples table", "shards table"} else _uses(audit, keys=not quick)
    cost: Counter[str] = Counter()
    shards = [] if "shards table" in broken else audit.shards
    for number, shard in enumerate(shards):
        found = _quick(audit, shard) if quick else verify_shard(audit.cache, shard["digest"])
        mine = uses.get(number, {})
        damaged += [_named(one, shard["field"], mine) for one in found]
        damaged += [] if found or quick else _wrong_rows(audit, shard, mine)
        cost[shard["field"]] += _rows_lost(found, mine)
        tick(1)
    return {"format": "latentry/verify", "version": 1, "ok": not damaged, "quick": quick, "shards": len(shards),
            "bytes": sum(shard["bytes"] for shard in shards), "damaged": damaged,
            "repair": {field: rows for field, rows in cost.items() if rows}}


def _damaged_tables(audit: Audit) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in ("samples", "shards", "findings"):
        try:
            getattr(audit, name)
        except CacheError as error:
            found.append({"shard": None, "field": f"{name} table", "row": None, "sample": None, "samples": [],
                          "what": error.message})
    return found


def _quick(audit: Audit, shard: dict[str, Any]) -> list[Damage]:
    digest = shard["digest"]
    try:
        size = shard_bytes(audit.cache.shard(digest))
    except OSError as error:
        return [_whole(digest, "the shard is missing" if isinstance(error, FileNotFoundError) else str(error))]
    if size != shard["bytes"]:
        return [_whole(digest, f"has {size} bytes, expected {shard['bytes']}")]
    return list(recorded(audit.cache, digest))


def _whole(digest: str, what: str) -> Damage:
    return Damage(shard=digest, field=None, array=None, row=None, what=what)


def _named(damage: Damage, field: str, mine: dict[int, list[Use]]) -> dict[str, Any]:
    """The damage with the samples that need it; `row` null: the whole shard."""
    rows = mine if damage.row is None else {damage.row: mine.get(damage.row, [])}
    who = sorted({use.who for uses in rows.values() for use in uses})
    return {"shard": damage.shard, "field": field, "row": damage.row, "sample": who[0] if who else None,
            "samples": who, "what": damage.what}


def _rows_lost(found: list[Damage], mine: dict[int, list[Use]]) -> int:
    """Rows that this manifest needs and has to have encoded again."""
    if any(damage.row is None for damage in found):
        return len(mine)
    return len({damage.row for damage in found} & set(mine))


def _wrong_rows(audit: Audit, shard: dict[str, Any], mine: dict[int, list[Use]]) -> list[dict[str, Any]]:
    """Rows of a sound shard that are not what their samples need."""
    keys = Reader(audit.cache.root).keys(shard["digest"])
    found = []
    for row, uses in sorted(mine.items()):
        stored = bytes(keys[row]).hex() if 0 <= row < len(keys) else None
        who = sorted({use.who for use in uses if stored is None or use.key not in (None, stored)})
        if who:
            found.append({"shard": shard["digest"], "field": shard["field"], "row": row, "sample": who[0],
                          "samples": who, "what": WRONG_ROW})
    return found


def _uses(audit: Audit, *, keys: bool) -> dict[int, dict[int, list[Use]]]:
    """Who needs which row, by shard number and row; with `keys`, also what the row's key should be."""
    found: dict[int, dict[int, list[Use]]] = defaultdict(lambda: defaultdict(list))
    for (shard, row), use in (*_view_uses(audit), *_text_uses(audit, keys), *_prompt_uses(audit)):
        found[shard][row].append(use)
    return found


def _view_uses(audit: Audit) -> Iterator[tuple[Place, Use]]:
    samples, views = audit.samples, audit.samples.views
    names = samples.table["name"].to_pylist()
    owners = np.repeat(np.arange(len(samples)), np.diff(samples.view_offsets)).tolist()
    columns = (views[name].tolist() for name in ("latent_shard", "latent_row", "mask_shard", "mask_row"))
    for owner, shard, row, mask_shard, mask_row in zip(owners, *columns, strict=True):
        yield (shard, row), Use(who=names[owner], key=None)
        if mask_shard >= 0:
            yield (mask_shard, mask_row), Use(who=names[owner], key=None)


def _text_uses(audit: Audit, keys: bool) -> Iterator[tuple[Place, Use]]:
    context = audit.manifest.fields["text"].context
    for name, texts in zip(*(audit.samples.table[column].to_pylist() for column in ("name", "texts")), strict=True):
        for text in texts:
            key = text_key(text["caption"], context) if keys else None
            yield (text["shard"], text["row"]), Use(who=name, key=key)


def _prompt_uses(audit: Audit) -> Iterator[tuple[Place, Use]]:
    prompts, context = audit.manifest.document["prompts"], audit.manifest.fields["text"].context
    nothing = unconditional_key(context)
    yield _place(prompts["unconditional"]), Use(who="(unconditional)", key=nothing)
    for sample in prompts["samples"]:
        who = f"(prompt) {sample['prompt']}"
        yield _place(sample["positive"]), Use(who=who, key=text_key(sample["prompt"], context))
        negative = nothing if sample["negative"] is None else text_key(sample["negative"], context)
        yield _place(sample["negative_row"]), Use(who=who, key=negative)


def _place(named: dict[str, int]) -> Place:
    return named["shard"], named["row"]
