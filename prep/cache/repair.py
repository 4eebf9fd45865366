"""A damaged shard, replaced by one of its good rows: only what is truly lost is encoded again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prep.cache import files, layout
from prep.cache.damage import recorded
from prep.cache.header import read_document
from prep.cache.layout import Shard
from prep.cache.ledger import commit, read_commit
from prep.cache.reader import Reader
from prep.cache.store import Cache, retire_shard
from prep.cache.writer import ShardWriter
from prep.digest import digest_json
from prep.errors import CacheError
from prep.parse import Unparsed
from prep.records import ArraySpec, Task


def damaged_shards(cache: Cache) -> list[str]:
    """The digests of shards with a damage record."""
    return list(cache.names("damaged"))


def salvage(cache: Cache, digest: str) -> Shard | None:
    """Copies a damaged shard's good rows into a new shard with a commit of its own, then retires the old one.

    None when no row could be saved. Every copied row passed its checksum again; a crash in between leaves both
    shards, and running this again ends it. Commits that name the old shard go before it, rejects in them with them.
    """
    new = _copy(cache, digest)
    for task in list(cache.names("commits")):
        found = read_commit(cache, task)
        if found is not None and found.shard is not None and found.shard.digest == digest:
            files.remove(cache.commit(task))
    retire_shard(cache, digest)
    return new


def _copy(cache: Cache, digest: str) -> Shard | None:
    damages = recorded(cache, digest)
    if any(damage.row is None for damage in damages):
        return None
    root = cache.shard(digest)
    reader = Reader(cache.root)
    try:
        field = layout.parse_group(read_document(root / "zarr.json"), "zarr.json")
        names = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name != layout.KEY)
        specs = [reader.array_info(digest, name)[0] for name in names]
        keys = [bytes(key).hex() for key in reader.keys(digest)]
    except (CacheError, Unparsed, OSError):
        return None
    bad = {damage.row for damage in damages}
    good = [(row, key) for row, key in enumerate(keys) if row not in bad]
    return _copy_rows(cache, reader, digest, field, specs, good)


def _copy_rows(
    cache: Cache, reader: Reader, digest: str, field: str, specs: Sequence[ArraySpec], rows: Sequence[tuple[int, str]]
) -> Shard | None:
    kept = []
    with ShardWriter(cache, field, specs) as writer:
        for row, key in rows:
            values = {spec.name: np.empty(spec.row_bytes, np.uint8) for spec in specs}
            try:
                for name, value in values.items():
                    reader.read_into(value, digest, name, row)
            except CacheError:
                continue
            writer.add(key, {name: value.data for name, value in values.items()})
            kept.append(key)
        if not kept:
            return None
        shard = writer.finish()
    task = Task(key=digest_json({"kind": "salvage", "meaning": 1, "field": field, "rows": kept}), field=field,
                rows=tuple(kept))
    commit(cache, task, shard, [], {"salvaged": digest})
    return shard
