"""Parses the rows of a SHARDS table, which is untrusted, and checks each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from prep.arrays import ITEM_BYTES, ArraySpec
from prep.cache import shard_format
from prep.cache.ledger.columns import KEY, Column
from prep.cache.remote.headers import ensure_headers
from prep.cache.remote.shards import RemoteShard
from prep.cache.shard_header import read_keys
from prep.cache.store import Cache
from prep.digest import canonical
from prep.errors import CacheError
from prep.formatting import format_bytes, grouped
from prep.manifest.tables import MOST
from prep.parse import Unparsed, brief, expect, list_of, one_of, within

HINT = "run prep encode again: it rewrites the manifest and encodes only missing rows"
MOST_SHARDS = 1 << 20
MOST_OF_A_MANIFEST = f"a manifest has at most {grouped(MOST_SHARDS)} shards and a table of {format_bytes(MOST)}"
MOST_SPELLED = 1 << 12  # characters of a shard's shapes or dtypes
MOST_ROW_BYTES = 1 << 27  # of one array: a float32 latent of the largest bucket that a manifest may have


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFacts:
    """One row of the SHARDS table."""

    digest: str
    field: str
    rows: int
    bytes: int  # of its files
    shapes: Mapping[str, tuple[int, ...]]  # of one row, by array
    dtypes: Mapping[str, str]

    @property
    def remote(self) -> RemoteShard:
        """The facts that fetching it from a store needs."""
        arrays = tuple(ArraySpec(name=name, dtype=self.dtypes[name], shape=shape)  # type: ignore[arg-type]  # checked
                       for name, shape in self.shapes.items())
        return RemoteShard(digest=self.digest, field=self.field, rows=self.rows, bytes=self.bytes, arrays=arrays)


def parse_shards(table: pa.Table) -> tuple[ShardFacts, ...]:
    """The rows of a SHARDS table. Raises `CacheError` for the first invalid row."""
    if len(table) > MOST_SHARDS:
        raise CacheError(f"the shard table has {len(table)} rows, expected at most {MOST_SHARDS}", hint=HINT)
    shards: list[ShardFacts] = []
    before = ("", "")
    for number, row in enumerate(table.to_pylist()):
        try:
            facts = _facts(row)
            if (facts.field, facts.digest) <= before:
                raise Unparsed("it is out of order or a duplicate")
        except Unparsed as error:
            raise CacheError(f"row {number} of the shard table is not valid: {error}", hint=HINT) from None
        before = (facts.field, facts.digest)
        shards.append(facts)
    return tuple(shards)


def manifests_for(shards: int, table: int) -> int:
    """The least number of manifests for samples in `shards` shards, with a SAMPLES table of `table` bytes."""
    return max(-(-shards // MOST_SHARDS), -(-table // MOST), 1)


def keys_at(cache: Cache, digests: Sequence[str], shard: Column, row: Column) -> Column:
    """The keys (S32) of rows given as shard number and row; empty bytes where the number is -1. Raises `CacheError`."""
    result = np.zeros(len(shard), KEY)
    ensure_headers(cache, [digests[number] for number in np.unique(shard).tolist() if number >= 0])
    order = np.argsort(shard, kind="stable")
    numbers, starts = np.unique(shard[order], return_index=True)
    for number, own in zip(numbers.tolist(), np.split(order, starts[1:]) if len(order) else (), strict=True):
        if number >= 0:
            keys = np.frombuffer(read_keys(cache, digests[number]).tobytes(), KEY)
            if len(keys) <= row[own].max():
                raise CacheError(f"shard {digests[number]} has {len(keys)} rows, expected more than {row[own].max()}",
                                 hint=HINT)
            result[own] = keys[row[own]]
    return result


def _facts(row: Mapping[str, Any]) -> ShardFacts:
    within(row["rows"], 1, shard_format.MAX_ROWS, "rows")
    shapes, dtypes = _shapes(row["shapes"]), _dtypes(row["dtypes"])
    if set(shapes) != set(dtypes) or not shapes:
        raise Unparsed(f"it has shapes for {brief(list(shapes))}, but dtypes for {brief(list(dtypes))}")
    least = 0
    for name, shape in shapes.items():
        spec = ArraySpec(name=name, dtype=dtypes[name], shape=shape)  # type: ignore[arg-type]  # checked
        if spec.row_bytes > MOST_ROW_BYTES:
            raise Unparsed(f"its array '{name}' has rows of {spec.row_bytes} bytes, expected at most {MOST_ROW_BYTES}")
        least += shard_format.data_bytes(spec, row["rows"])
    within(row["bytes"], least, (1 << 53) - 1, "bytes")
    return ShardFacts(digest=row["digest"].hex(), rows=row["rows"],
                      field=shard_format.checked_name(row["field"], "field"), bytes=row["bytes"],
                      shapes=shapes, dtypes=dtypes)


@lru_cache(maxsize=1 << 10)  # thousands of shards share a few dozen strings
def _shapes(text: str) -> Mapping[str, tuple[int, ...]]:
    return {shard_format.checked_name(name, "shapes"): tuple(list_of(sides, _side, f"shapes.{name}"))
            for name, sides in _json(text, "shapes").items()}


@lru_cache(maxsize=1 << 10)
def _dtypes(text: str) -> Mapping[str, str]:
    return {shard_format.checked_name(name, "dtypes"): one_of(dtype, ITEM_BYTES, f"dtypes.{name}")
            for name, dtype in _json(text, "dtypes").items()}


def _side(value: Any, where: str) -> int:
    side = expect(value, int, where)
    within(side, 1, MOST_ROW_BYTES, where)
    return side


def _json(text: str, where: str) -> dict[str, Any]:
    if len(text) > MOST_SPELLED:
        raise Unparsed(f"{where} has {len(text)} characters, expected at most {MOST_SPELLED}")
    try:
        document = json.loads(text)
        spelled = canonical(document).decode()
    except (ValueError, TypeError, RecursionError) as error:
        raise Unparsed(f"{where} is not canonical JSON: {brief(str(error))}") from None
    if spelled != text:
        raise Unparsed(f"{where} is {brief(text)}, expected canonical JSON")
    table: dict[str, Any] = expect(document, dict, where)
    return table
