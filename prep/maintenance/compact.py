"""Implements `prep compact`: joins small shards while other processes may use the cache, and reports the result.

Small shards of a cache in a store are downloaded, joined here, and uploaded. Nothing there is removed, or replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prep.cache.ledger.ledger import Ledger, load_ledger
from prep.cache.publish import clear_leftovers
from prep.cache.remote.gather import downloaded
from prep.cache.remote.opening import open_to_encode
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.formatting import counted, format_bytes
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.place import Place
from prep.maintenance.join import LostRow, Part, join, plan_joins, rejects_by_shard, sources_of, unverifiable
from prep.progress import Progress


@dataclass(kw_only=True, slots=True)
class JoinedShards:
    """The result, or expected result, for a field's small shards."""

    sources: set[str] = field(default_factory=set)  # digests
    into: int = 0
    rows: int = 0
    bytes: int = 0  # of the new shards; an estimate in a dry run


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactReport:
    """What `prep compact` did."""

    fields: Mapping[str, JoinedShards]
    lost: tuple[LostRow, ...]
    dry_run: bool
    recorded: bool = True  # whether encode repairs the damage without --recheck

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        fields = {name: {"joined": len(tally.sources), "into": tally.into, "rows": tally.rows, "bytes": tally.bytes}
                  for name, tally in self.fields.items()}
        damaged = [{"field": lost.field, "key": lost.key, "shard": shard, "row": row}
                   for lost in self.lost for shard, row in lost.places]
        return {"format": "latentry/compact", "version": 1, "dry_run": self.dry_run, "fields": fields,
                "bytes": sum(tally.bytes for tally in self.fields.values()), "damaged": damaged}

    def as_text(self) -> str:
        """The report as a few lines of text."""
        document = self.as_json()
        verb = "would join" if self.dry_run else "joined"
        lines = [f"{name}: {verb} {counted(row['joined'], 'shard')} into {row['into']} ({counted(row['rows'], 'row')}, "
                 f"{format_bytes(row['bytes'])})" for name, row in document["fields"].items()]
        lines += [f"damaged, and dropped: {entry['field']} row {entry['row']} of shard {entry['shard'][:12]}"
                  for entry in document["damaged"]]
        if document["damaged"]:
            lines.append("to repair, run prep encode again as it was first run"
                         + ("" if self.recorded else ", with --recheck"))
        if not document["fields"]:
            return "\n".join(["nothing to join", *lines])
        if not self.dry_run:
            lines += ["old shards are kept until you run:",
                      "  1. prep encode, once more for each manifest, which then names the new shards",
                      "  2. prep gc, which removes the old ones"]
        return "\n".join(lines)


def compact(path: Place, *, shard_bytes: int, dry_run: bool, progress: Progress) -> CompactReport:
    """Joins the small shards of the cache at `path`, a directory or a URL; after an interruption, the next call does
    the rest.

    Raises `CacheError`, `PathError`.
    """
    cache = open_to_encode(path, create=False)
    if dry_run:
        ledger = load_ledger(cache)
        parts = plan_joins(cache, ledger, shard_bytes=shard_bytes)
        return CompactReport(fields=_expected(parts), lost=(), dry_run=True)
    with suppress(CacheError), lock_directory(cache.root, exclusive=True):  # unless another process works there
        clear_leftovers(cache.unsent)
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        ledger = load_ledger(cache)
        parts = plan_joins(cache, ledger, shard_bytes=shard_bytes)
        return _run(cache, ledger, parts, progress)


def _run(cache: Cache, ledger: Ledger, parts: Sequence[Part], progress: Progress) -> CompactReport:
    rejects = rejects_by_shard(cache) if parts else {}
    sizes = {shard.digest: shard.bytes for shard in ledger.shards}
    sources = {digest: sizes[digest] for digest in sources_of(parts)}
    fields: dict[str, JoinedShards] = {}
    lost: list[LostRow] = []
    with downloaded(cache, sources, progress) as source_cache:
        with progress("checking", len(sources), "shards") as tick:
            shunned = unverifiable(source_cache, list(sources), tick)
        with progress("joining", sum(len(part.first) for part in parts), "rows") as tick:
            for part in parts:
                said = [reject for source in part.sources for reject in rejects.pop(source, ())]  # store each once
                shard, missing = join(cache, source_cache, ledger, part, said, tick, shunned)
                lost += missing
                if shard is not None:
                    _add(fields, part, rows=shard.rows, size=shard.bytes)
    return CompactReport(fields=fields, lost=tuple(lost), dry_run=False, recorded=cache.records_damage)


def _expected(parts: Sequence[Part]) -> dict[str, JoinedShards]:
    fields: dict[str, JoinedShards] = {}
    for part in parts:
        _add(fields, part, rows=len(part.first), size=len(part.first) * part.row_bytes)
    return fields


def _add(fields: dict[str, JoinedShards], part: Part, *, rows: int, size: int) -> None:
    tally = fields.setdefault(part.field, JoinedShards())
    tally.sources.update(part.sources)
    tally.into += 1
    tally.rows += rows
    tally.bytes += size
