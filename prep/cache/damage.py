"""What was found damaged, one record a shard under damaged/: a hint that `encode` acts on, gone with the shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prep.cache import files
from prep.cache.door import NotPlain, read_plain
from prep.cache.layout import MAX_ROWS
from prep.cache.store import Cache
from prep.digest import canonical, seal
from prep.parse import Unparsed, count, digest_of, expect, list_of, sealed_json

MOST = 1 << 28  # bytes of a record: every row of the largest shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """One damaged row, or a whole shard."""

    shard: str
    field: str | None  # None: the shard does not say any more
    array: str | None  # None: the whole shard
    row: int | None  # None: the whole shard
    what: str


def record(cache: Cache, found: Iterable[Damage]) -> None:
    """Adds damages to what the cache remembers."""
    by_shard: dict[str, set[Damage]] = {}
    for damage in found:
        by_shard.setdefault(damage.shard, set(recorded(cache, damage.shard))).add(damage)
    for shard, damages in by_shard.items():
        target = cache.damaged(shard)
        files.make_dirs(target.parent)
        rows = sorted((_as_json(damage) for damage in damages), key=canonical)
        document = {"format": "latentry/damage", "version": 1, "shard": shard, "damages": rows}
        files.write_whole(target, canonical(seal(document)), staging=cache.staging())


def record_if_writable(cache: Cache, found: Iterable[Damage]) -> None:
    """The same for readers, to whom a read-only cache is no fault."""
    with contextlib.suppress(OSError):
        record(cache, found)


def recorded(cache: Cache, shard: str) -> tuple[Damage, ...]:
    """What is remembered of a shard. A record that is itself damaged counts against the whole shard."""
    try:
        return _parse(read_plain(cache.damaged(shard), MOST), shard)
    except FileNotFoundError:
        return ()
    except (Unparsed, NotPlain) as error:
        return (Damage(shard=shard, field=None, array=None, row=None, what=str(error)),)


def forget(cache: Cache, shard: str) -> None:
    """Removes a shard's record, there or not."""
    files.remove(cache.damaged(shard))


def _as_json(damage: Damage) -> dict[str, Any]:
    return {"field": damage.field, "array": damage.array, "row": damage.row, "what": damage.what}


def _parse(data: bytes, shard: str) -> tuple[Damage, ...]:
    document = sealed_json(data, "damage record")
    digest_of(document.get("shard"), "shard of damage record")
    if (document["shard"], document.get("format"), document.get("version")) != (shard, "latentry/damage", 1):
        raise Unparsed(f"damage record is of another shard or version, expected version 1 for shard {shard}")
    return tuple(list_of(document.get("damages"), lambda value, where: _one(value, where, shard), "damages"))


def _one(value: Any, where: str, shard: str) -> Damage:
    table = expect(value, dict, where)
    row = table.get("row")
    return Damage(
        shard=shard,
        field=_string_or_none(table, "field", where),
        array=_string_or_none(table, "array", where),
        row=None if row is None else count(row, f"{where}.row", MAX_ROWS),
        what=expect(table.get("what"), str, f"{where}.what"),
    )


def _string_or_none(table: dict[str, Any], name: str, where: str) -> str | None:
    value = table.get(name)
    return None if value is None else expect(value, str, f"{where}.{name}")
