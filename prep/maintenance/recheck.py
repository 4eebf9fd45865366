"""Verifies the shards that an encode is about to reuse: implements `prep encode --recheck`.

Usually the process that finds damage records it in the cache. It cannot do that in a cache that cannot be written (a
read-only mount, a full disk, another user's directory), and bytes that decay on the disk do not change a file's stamp.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from prep.cache.damage import Damage
from prep.cache.ledger.index import drop_index
from prep.cache.ledger.ledger import load_ledger
from prep.cache.remote.headers import as_stored
from prep.cache.remote.stored import forget_shard
from prep.cache.shard_check import is_recorded, verify_shard
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.remote.retry import side_by_side
from prep.maintenance.verify import one_at_a_time
from prep.progress import Progress, Tick


def recheck(cache: Cache, keys: Collection[str], *, jobs: int, progress: Progress) -> None:
    """Verifies the shards that would be reused for `keys` and records damage, so that encode repairs it.

    Raises `CacheError` if a shard cannot be read, or damage cannot be recorded.
    """
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        drop_index(cache)
        done: set[str] = set()
        while shards := _in_use(cache, keys, done):
            with progress("verifying", sum(shards.values()), "bytes") as tick:
                _verify(cache, list(shards), jobs, one_at_a_time(tick))
            done |= set(shards)


def _in_use(cache: Cache, keys: Collection[str], done: set[str]) -> dict[str, int]:
    """Bytes by digest of the shards with these rows; rows of a damaged shard may be in another shard, too."""
    ledger = load_ledger(cache)
    used = {place.shard for place in ledger.resolve(keys).values()} - done
    return {shard.digest: shard.bytes for shard in ledger.shards if shard.digest in used}


def _verify(cache: Cache, shards: list[str], jobs: int, tick: Tick) -> None:
    stop = threading.Event()
    looks = side_by_side(lambda digest: _look(cache, digest, tick, stop), shards, jobs, stop)
    for digest, damages in zip(shards, looks, strict=True):
        for damage in damages:
            if damage.transient:
                raise CacheError(f"shard {digest} {damage.what}",
                                 hint="check the permissions of the cache and the disk, then run this again")
        if not is_recorded(cache, digest, damages):
            raise CacheError(f"shard {digest} is damaged, and that cannot be recorded: {cache.root} cannot be written",
                             hint="free some space, or check the permissions of the cache, then run this again")


def _look(cache: Cache, digest: str, tick: Tick, stop: threading.Event) -> list[Damage]:
    """The damage of a shard that is to be recorded; in a store a damaged one counts as missing from now on."""
    with as_stored(cache, digest, rows=True, stop=stop) as stored:
        damages = verify_shard(stored, digest, tick=tick)
    if damages and not cache.records_damage:
        forget_shard(cache, digest)
        return []
    return damages
