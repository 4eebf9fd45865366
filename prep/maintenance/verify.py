"""Is every byte that a manifest needs still what it was, and does every row belong to its sample? Behind `prep verify`.

Damage is named with the samples that need it, and with what its repair costs: rows to be encoded again, by field.
Shards are read by threads, each byte once: hashing and reading hold no lock of Python's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from prep.cache.damage import Damage, is_lost, record_if_writable, recorded
from prep.cache.ledger.index import drop_index
from prep.cache.ledger.ledger import load_ledger, shard_bytes
from prep.cache.shard_check import NOT_THERE, is_lasting, is_recorded, quick_check, verify_shard, whole_shard
from prep.cache.shard_header import Header, read_header, read_keys
from prep.errors import CacheError
from prep.fs.lock import PATIENCE, lock_directory
from prep.maintenance.documents import check_up, notes_on_damage_records
from prep.maintenance.references import References
from prep.manifest.opened import OpenedManifest
from prep.progress import Tick

WRONG_ROW = "its key is not the one of this sample: the manifest's tables and its shards do not belong together"
UNREADABLE = "what cannot be read may be sound: check the rights to it and the disk, then verify again"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardResult:
    """What was found in one shard."""

    number: int
    damaged: Sequence[Damage] = ()
    wrong: Mapping[int, list[str]] | None = None  # rows of a sound shard that are not their samples', and whose
    recorded: bool = True  # `prep encode` finds this damage by itself

    @property
    def lost(self) -> bool:
        """Whether the whole shard is."""
        return any(one.array is None and not one.transient for one in self.damaged)


def verify(audit: OpenedManifest, *, quick: bool = False, jobs: int = 2, tick: Tick = lambda _: None) -> dict[str, Any]:
    """The document of `prep verify --json`; calls `tick` with the bytes of shards as they are dealt with.

    `quick` looks at sizes, documents, keys and shard indexes instead of rows, and repeats the damage remembered by
    readers. Damage is data here: nothing is raised for it. `unrecorded` are the damaged shards of which the cache has
    no record, as it cannot be written: `prep encode` repairs them with `--recheck`. `repair` is None where a table is
    lost that would say which rows are needed. Raises `CacheError` while gc cleans the cache.
    """
    with lock_directory(audit.cache.root, exclusive=False, patience=PATIENCE):
        damaged = _damaged_tables(audit)
        broken = {one["field"] for one in damaged}
        uses = None if broken & {"samples table", "shards table"} else References(audit)
        told = "shards table" not in broken
        shards = audit.shards if told else []
        counted, notes = one_at_a_time(tick), notes_on_damage_records(audit.cache)  # before any of them goes
        with ThreadPoolExecutor(jobs, "verify") as pool:
            try:
                work = [pool.submit(_check_shard, audit, uses, number, quick, counted) for number in range(len(shards))]
                mine = {shard["digest"]: shard for shard in shards} if told else None
                checkup = check_up(audit.cache, mine)  # while they read
                looks = [one.result() for one in work]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        checkup.notes += notes
        damaged += [_entry("commit", what) for what in checkup.damaged]
        damaged += [entry for look in looks for entry in _entries(shards[look.number], look, uses)]
        if damaged or checkup.notes:
            drop_index(audit.cache)  # the next ledger is read from what the files say now
        ill = [look for look in looks if look.damaged]
        cost = None if not told or (ill and uses is None) else _cost(audit, uses, ill)
        if any(one.transient for look in looks for one in look.damaged):
            checkup.notes.append(UNREADABLE)
    return {"format": "latentry/verify", "version": 1, "ok": not damaged, "quick": quick, "shards": len(shards),
            "bytes": sum(shard["bytes"] for shard in shards), "damaged": damaged, "notes": checkup.notes,
            "unrecorded": [shards[look.number]["digest"] for look in looks if not look.recorded],
            "repair": None if cost is None else {field: rows for field, rows in sorted(cost.items()) if rows}}


def _damaged_tables(audit: OpenedManifest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in ("samples", "shards", "findings"):
        try:
            getattr(audit, name)
        except CacheError as error:
            found.append(_entry(f"{name} table", error.message))
    return found


def _entry(field: str, what: str) -> dict[str, Any]:
    """Damage that is of no shard."""
    return {"shard": None, "field": field, "row": None, "sample": None, "samples": [], "what": what}


def one_at_a_time(tick: Tick) -> Tick:
    """`tick` for threads."""
    lock = threading.Lock()

    def locked(count: int) -> None:
        with lock:
            tick(count)

    return locked


def _check_shard(audit: OpenedManifest, uses: References | None, number: int, quick: bool, tick: Tick) -> ShardResult:
    shard = audit.shards[number]
    digest = shard["digest"]
    if quick:
        found = _quick(audit, shard)
        record_if_writable(audit.cache, filter(is_lasting, found))
        tick(shard["bytes"])
    else:
        found = verify_shard(audit.cache, digest, tick=tick)
    if found:
        return ShardResult(number=number, damaged=found, recorded=is_recorded(audit.cache, digest, found))
    try:
        header = read_header(audit.cache, digest)
    except CacheError as error:  # it was sound a moment ago
        return ShardResult(number=number, damaged=[whole_shard(digest, error.message)])
    if (what := _contradiction(shard, header)) is not None:
        return ShardResult(number=number, damaged=[whole_shard(digest, what)])
    return ShardResult(number=number, wrong=None if quick or uses is None else _wrong_rows(header, number, uses))


def _quick(audit: OpenedManifest, shard: Mapping[str, Any]) -> list[Damage]:
    digest = shard["digest"]
    try:
        size = shard_bytes(audit.cache.shard(digest))
    except CacheError as error:  # something else is in the place of its directory
        return [whole_shard(digest, error.message)]
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return [whole_shard(digest, NOT_THERE)]
        return [replace(whole_shard(digest, f"cannot be read: {error}"), transient=not is_lost(error))]
    if size != shard["bytes"]:
        return [whole_shard(digest, f"has {size} bytes, expected {shard['bytes']}")]
    return [*quick_check(audit.cache, digest), *recorded(audit.cache, digest)]


def _contradiction(shard: Mapping[str, Any], header: Header) -> str | None:
    """How a sound shard is another one than the manifest's table says."""
    is_so = {"field": header.field, "rows": header.rows,
             "shapes": {spec.name: list(spec.shape) for spec in header.arrays},
             "dtypes": {spec.name: spec.dtype for spec in header.arrays}}
    for name, value in is_so.items():
        if shard[name] != value:
            return f"{name} of this shard: {value}, expected {shard[name]} as the manifest's table says"
    return None


def _wrong_rows(header: Header, number: int, uses: References) -> dict[int, list[str]]:
    """Rows of a sound shard that are not what their samples need."""
    wrong: dict[int, set[str]] = {}
    stored = [bytes(key).hex() for key in header.keys]
    for need in uses.needs(number):
        there = 0 <= need.row < len(stored)
        if not there or (need.keys and stored[need.row] not in need.keys):
            wrong.setdefault(need.row, set()).add(uses.who(need.use))
    return {row: sorted(who) for row, who in sorted(wrong.items())}


def _entries(shard: Mapping[str, Any], look: ShardResult, uses: References | None) -> list[dict[str, Any]]:
    """What was found in a shard with the samples that need it; `row` null: the whole shard, or its shard index."""
    found = []
    for one in look.damaged:
        who = [] if uses is None or (one.row is None and one.array) else uses.names(look.number, one.row)
        what = f"array '{one.array}' {one.what}" if one.array and one.row is not None else one.what
        found.append((one.row, who, what))
    found += [(row, who, WRONG_ROW) for row, who in (look.wrong or {}).items()]
    return [{"shard": shard["digest"], "field": shard["field"], "row": row, "sample": who[0] if who else None,
             "samples": who, "what": what} for row, who, what in found]


def _cost(audit: OpenedManifest, uses: References | None, looks: Iterable[ShardResult]) -> Counter[str]:
    """Rows that this manifest needs and that have to be encoded again, by field: no other shard has them.

    The key of a mask from a file is not known where its shard does not say; then it counts.
    """
    cost: Counter[str] = Counter()
    lost = {} if uses is None else {look.number: rows for look in looks if (rows := _lost(audit, uses, look))}
    if not lost:
        return cost
    ledger = load_ledger(audit.cache)
    spoiled = {audit.shards[number]["digest"] for number in lost}
    for number, rows in lost.items():
        places = ledger.resolve(key for keys in rows.values() for key in keys)
        elsewhere = {key for key, place in places.items() if place.shard not in spoiled}
        cost[audit.shards[number]["field"]] += sum(elsewhere.isdisjoint(keys) for keys in rows.values())
    return cost


def _lost(audit: OpenedManifest, uses: References, look: ShardResult) -> dict[int, tuple[str, ...]]:
    """The needed rows of a damaged shard that are lost, and the keys that each may have had."""
    gone = {one.row for one in look.damaged if one.row is not None}
    rows = [row for row in uses.rows(look.number) if look.lost or row in gone]
    if not rows:
        return {}
    found = {need.row: need.keys for need in uses.needs(look.number)}
    try:
        stored = [(bytes(key).hex(),) for key in read_keys(audit.cache, audit.shards[look.number]["digest"])]
    except CacheError:
        stored = []
    return {row: found[row] or (stored[row] if row < len(stored) else ()) for row in rows}
