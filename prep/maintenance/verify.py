"""Implements `prep verify`: checks every byte that a manifest needs, and that every row belongs to its sample.

Damage is reported with the samples that need it, and with the cost of its repair: rows to re-encode, by field.
Threads read the shards, each byte once: hashing and reading do not hold Python's global lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from prep.cache.damage import Damage, is_lost, record_if_writable, recorded
from prep.cache.ledger.index import drop_index
from prep.cache.ledger.ledger import ledger_at_hand
from prep.cache.remote.headers import as_stored, ensure_headers
from prep.cache.shard_check import NOT_THERE, is_lasting, is_recorded, quick_check, verify_shard, whole_shard
from prep.cache.shard_header import Header, read_header, read_keys
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.tree import tree_bytes
from prep.maintenance.documents import Checkup, check_up, notes_on_damage_records
from prep.maintenance.references import References
from prep.manifest.commands import encode_command, mending
from prep.manifest.opened import OpenedManifest
from prep.progress import Tick

WRONG_ROW = "row key does not match its sample: the manifest's tables and this shard come from different runs"
UNREADABLE = "unreadable files may be intact: check permissions and the disk, then verify again"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardResult:
    """The result for one shard."""

    number: int
    damaged: Sequence[Damage] = ()
    wrong: Mapping[int, list[str]] | None = None  # wrong rows of an intact shard, and the samples that need them
    recorded: bool = True  # `prep encode` will find this damage without --recheck

    @property
    def lost(self) -> bool:
        """Whether the whole shard is lost."""
        return any(damage.array is None and not damage.transient for damage in self.damaged)


def verify(audit: OpenedManifest, *, quick: bool = False, jobs: int = 2, tick: Tick = lambda _: None) -> dict[str, Any]:
    """The document of `prep verify --json`; calls `tick` with the bytes of shards as they are checked.

    `quick` checks sizes, documents, keys and shard indexes instead of rows, and reports the damage recorded by readers.
    Damage is reported, not raised. `unrecorded` lists the damaged shards that the cache has no record of, because it
    cannot be written: `prep encode --recheck` repairs them. `repair` is None if a table that states which rows are
    needed is lost. Raises `CacheError` while gc cleans the cache.
    """
    with lock_directory(audit.cache.root, exclusive=False, patience=PATIENCE):
        damaged = _damaged_tables(audit)
        broken, whole = {entry["field"] for entry in damaged}, audit.cache.is_whole
        uses = None if broken & {"samples table", "shards table"} else References(audit)
        listed = "shards table" not in broken
        shards = audit.shards if listed else []
        counted, notes = one_at_a_time(tick), notes_on_damage_records(audit.cache)  # before verifying removes records
        stop = threading.Event()
        with ThreadPoolExecutor(jobs, "verify") as pool:
            try:
                work = [pool.submit(_check_shard, audit, uses, number, quick, counted, stop)
                        for number in range(len(shards))]
                mine = {shard["digest"]: shard for shard in shards} if listed else None
                # While the threads read. The commits of a store are not read.
                checkup = check_up(audit.cache, mine) if whole else Checkup()
                looks = [future.result() for future in work]
            except BaseException:
                stop.set()  # threads may wait for a store
                pool.shutdown(cancel_futures=True)
                raise
        checkup.notes += notes
        damaged += [_entry("commit", what) for what in checkup.damaged]
        damaged += [entry for look in looks for entry in _entries(shards[look.number], look, uses)]
        if damaged or checkup.notes:
            drop_index(audit.cache)  # the next ledger is read from the files themselves
        ill = [look for look in looks if look.damaged]
        cost = None if not listed or (ill and uses is None) else _cost(audit, uses, ill)
        checkup.notes += _advice(audit, ill, in_store=bool(damaged) and not whole)
    return {"format": "latentry/verify", "version": 1, "ok": not damaged, "quick": quick, "shards": len(shards),
            "bytes": sum(shard["bytes"] for shard in shards), "damaged": damaged, "notes": checkup.notes,
            "unrecorded": [shards[look.number]["digest"] for look in looks if not look.recorded],
            "repair": None if cost is None else {field: rows for field, rows in sorted(cost.items()) if rows}}


def _advice(audit: OpenedManifest, ill: Sequence[ShardResult], *, in_store: bool) -> Iterator[str]:
    """Notes on how damage is repaired, where it is not as usual; `in_store`: there is damage in an object store."""
    if in_store:
        yield (f"the cache is in an object store; to repair it, {mending(audit.manifest)}; all rows of a damaged shard "
               "are then made again")
    if ill and "imported" in audit.manifest.document["latents"]:
        yield ("latents were imported; what imports damaged ones again, if their caches are still there: "
               f"{encode_command(audit.manifest, '--recheck')}")
    if any(damage.transient for look in ill for damage in look.damaged):
        yield UNREADABLE


def _damaged_tables(audit: OpenedManifest) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for name in ("samples", "shards", "findings"):
        try:
            getattr(audit, name)
        except CacheError as error:
            entries.append(_entry(f"{name} table", error.message))
    return entries


def _entry(field: str, what: str) -> dict[str, Any]:
    """An entry for damage outside shards."""
    return {"shard": None, "field": field, "row": None, "sample": None, "samples": [], "what": what}


def one_at_a_time(tick: Tick) -> Tick:
    """A thread-safe `tick`."""
    lock = threading.Lock()

    def locked(count: int) -> None:
        with lock:
            tick(count)

    return locked


def _check_shard(audit: OpenedManifest, uses: References | None, number: int, quick: bool, tick: Tick,
                 stop: threading.Event) -> ShardResult:
    shard = audit.shards[number]
    with as_stored(audit.cache, shard["digest"], rows=not quick, stop=stop) as cache:
        return _check_at(cache, shard, uses, number, quick, tick)


def _check_at(cache: Cache, shard: Mapping[str, Any], uses: References | None, number: int, quick: bool,
              tick: Tick) -> ShardResult:
    digest = shard["digest"]
    if quick:
        damages = _quick(cache, shard)
        record_if_writable(cache, filter(is_lasting, damages))
        tick(shard["bytes"])
    else:
        damages = verify_shard(cache, digest, tick=tick)
    if damages:
        return ShardResult(number=number, damaged=damages, recorded=is_recorded(cache, digest, damages))
    try:
        header = read_header(cache, digest)
    except CacheError as error:  # damaged since it was verified
        return ShardResult(number=number, damaged=[whole_shard(digest, error.message)])
    if (what := _contradiction(shard, header)) is not None:
        return ShardResult(number=number, damaged=[whole_shard(digest, what)])
    return ShardResult(number=number, wrong=None if quick or uses is None else _wrong_rows(header, number, uses))


def _quick(cache: Cache, shard: Mapping[str, Any]) -> list[Damage]:
    digest = shard["digest"]
    try:
        size = tree_bytes(cache.shard(digest))
    except CacheError as error:  # its directory was replaced by something else
        return [whole_shard(digest, error.message)]
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return [whole_shard(digest, NOT_THERE)]
        return [replace(whole_shard(digest, f"cannot be read: {error}"), transient=not is_lost(error))]
    if size != shard["bytes"]:
        return [whole_shard(digest, f"has {size} bytes, expected {shard['bytes']}")]
    return [*quick_check(cache, digest), *recorded(cache, digest)]


def _contradiction(shard: Mapping[str, Any], header: Header) -> str | None:
    """How an intact shard contradicts the manifest's table; None if it does not."""
    is_so = {"field": header.field, "rows": header.rows,
             "shapes": {spec.name: list(spec.shape) for spec in header.arrays},
             "dtypes": {spec.name: spec.dtype for spec in header.arrays}}
    for name, value in is_so.items():
        if shard[name] != value:
            return f"{name} of this shard: {value}, expected {shard[name]} as in the manifest's table"
    return None


def _wrong_rows(header: Header, number: int, uses: References) -> dict[int, list[str]]:
    """Rows of an intact shard whose keys do not match their samples, with the names of those."""
    wrong: dict[int, set[str]] = {}
    stored = [bytes(key).hex() for key in header.keys]
    for need in uses.needs(number):
        exists = 0 <= need.row < len(stored)
        if not exists or (need.keys and stored[need.row] not in need.keys):
            wrong.setdefault(need.row, set()).add(uses.who(need.use))
    return {row: sorted(who) for row, who in sorted(wrong.items())}


def _entries(shard: Mapping[str, Any], look: ShardResult, uses: References | None) -> list[dict[str, Any]]:
    """The report entries of a shard, with the samples that need it; `row` null: the whole shard, or its shard index."""
    entries = []
    for damage in look.damaged:
        who = [] if uses is None or (damage.row is None and damage.array) else uses.names(look.number, damage.row)
        what = f"array '{damage.array}' {damage.what}" if damage.array and damage.row is not None else damage.what
        entries.append((damage.row, who, what))
    entries += [(row, who, WRONG_ROW) for row, who in (look.wrong or {}).items()]
    return [{"shard": shard["digest"], "field": shard["field"], "row": row, "sample": who[0] if who else None,
             "samples": who, "what": what} for row, who, what in entries]


def _cost(audit: OpenedManifest, uses: References | None, looks: Iterable[ShardResult]) -> Counter[str]:
    """Number of rows, by field, that this manifest needs and that must be re-encoded because no other shard has them.

    A mask from a file counts if its shard is too damaged to state its key.
    """
    cost: Counter[str] = Counter()
    lost = {} if uses is None else {look.number: rows for look in looks if (rows := _lost(audit, uses, look))}
    if not lost:
        return cost
    ledger = ledger_at_hand(audit.cache)
    spoiled = {audit.shards[number]["digest"] for number in lost}
    for number, rows in lost.items():
        places = ledger.resolve(key for keys in rows.values() for key in keys)
        elsewhere = {key for key, place in places.items() if place.shard not in spoiled}
        cost[audit.shards[number]["field"]] += sum(elsewhere.isdisjoint(keys) for keys in rows.values())
    return cost


def _lost(audit: OpenedManifest, uses: References, look: ShardResult) -> dict[int, tuple[str, ...]]:
    """The needed rows that are lost in a damaged shard, with the keys that each may have had."""
    gone = {damage.row for damage in look.damaged if damage.row is not None}
    rows = [row for row in uses.rows(look.number) if look.lost or row in gone]
    if not rows:
        return {}
    keys = {need.row: need.keys for need in uses.needs(look.number)}
    try:
        digest = audit.shards[look.number]["digest"]
        ensure_headers(audit.cache, [digest])
        stored = [(bytes(key).hex(),) for key in read_keys(audit.cache, digest)]
    except CacheError:
        stored = []
    return {row: keys[row] or (stored[row] if row < len(stored) else ()) for row in rows}
