"""Commits in a store without which a manifest must not be written, or replaced."""

from __future__ import annotations

from collections.abc import Collection, Set

from prep.cache.ledger.ledger import Ledger, load_ledger
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.formatting import counted
from prep.fs.place import Place
from prep.manifest.document import Manifest
from prep.manifest.tables import SHARDS, read_table


def require_shards(cache: Cache, manifest: Manifest) -> None:
    """Raises `CacheError` if commits of a manifest's shards are gone from a store: `prep gc` ran there meanwhile."""
    if cache.has_lock:
        return
    table = read_table(cache, manifest.document["tables"]["shards"], SHARDS)
    lost = {digest.as_py().hex() for digest in table["digest"]} - {shard.digest for shard in load_ledger(cache).shards}
    if lost:
        raise CacheError(f"{manifest.path} was written, but {_uncommitted(cache, lost)}: prep gc may have "
                         "removed them meanwhile", hint="run the same command again, which encodes what is missing")


def require_commits(cache: Cache, path: Place, needed: Set[str], ledger: Ledger) -> None:
    """Raises `CacheError`, before a manifest in a store is replaced, if shards that it goes on to need have no commit.

    Such shards were uploaded without their commits. Other caches do not need them.
    """
    lost = needed - {shard.digest for shard in ledger.shards}
    if lost and not cache.has_lock:
        raise CacheError(f"{path} is not replaced, because {_uncommitted(cache, lost)}",
                         hint="run prep push MANIFEST URL again where the cache was uploaded from, which sends the "
                         "commits; or prep encode as it was first run, which encodes these rows again")


def _uncommitted(cache: Cache, lost: Collection[str]) -> str:
    return f"{cache.store} has no commits for {counted(len(lost), 'shard')} that it names"
