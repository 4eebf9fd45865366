"""Repairs damage at the least cost: keeps intact shards, copies good rows, leaves only lost rows to re-encode."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prep.arrays import ArraySpec
from prep.cache import shard_format
from prep.cache.commits import Commit, is_damaged, read_commit, tasks_by_shard
from prep.cache.damage import forget
from prep.cache.ledger.columns import KEY, Column, among, ordered, packed
from prep.cache.ledger.ledger import Ledger, write_commit
from prep.cache.publish import retire_shard
from prep.cache.records import Shard, Task
from prep.cache.remote.stored import forget_commit
from prep.cache.remote.unsent import orphans, rows_kept
from prep.cache.shard_check import bad_rows, is_transient, read_rows, verify_shard
from prep.cache.shard_header import Header, read_header, read_keys
from prep.cache.store import Cache
from prep.cache.writer import ShardWriter
from prep.digest import digest_json, digest_parts
from prep.errors import CacheError
from prep.fs import atomic
from prep.fs.tree import file_digest, listing_digest, tree, tree_bytes, tree_digest
from prep.progress import Progress, Tick, phase, silent


def damaged_shards(cache: Cache) -> list[str]:
    """The digests of shards with a damage record; none in a store, of whose shards the copies are fetched again."""
    return list(cache.names("damaged")) if cache.records_damage else []


def incomplete_commits(cache: Cache, ledger: Ledger) -> list[str]:
    """The tasks whose commit does not count: it is damaged, or its shard is missing, incomplete or damaged."""
    return [task for task in cache.names("commits") if not ledger.has_commit(task)]


def repair_commits(cache: Cache, tasks: Iterable[str]) -> None:
    """Checks the given commits: salvages damaged shards; removes damaged commits and those that match no shard.

    Needs the exclusive lock.
    """
    for task in tasks:
        commit = read_commit(cache, task)
        if commit is None:
            if is_damaged(cache, task):
                atomic.remove_tree(cache.commit(task))
        elif commit.shard is not None and not forget_commit(cache, commit):
            _mend_shard(cache, commit, commit.shard)


def _mend_shard(cache: Cache, commit: Commit, shard: Shard) -> None:
    if not cache.shard(shard.digest).is_dir():
        atomic.remove_tree(cache.commit(commit.task))
    elif verify_shard(cache, shard.digest):
        if cache.damaged(shard.digest).exists():  # otherwise it could not be read, which may pass
            salvage(cache, shard.digest)
    elif _stated(cache, shard.digest) != (commit.field, shard):  # `adopt_orphans` finds the shard again
        atomic.remove_tree(cache.commit(commit.task))


def adopt_orphans(cache: Cache, ledger: Ledger, wanted: Collection[str], progress: Progress = silent) -> list[Shard]:
    """Writes commits for shards that no intact commit names and that hold wanted rows, which then are not re-encoded.

    Such shards come from a damaged commit, or a crash before the commit. Their digests are verified first.
    """
    made, digests = cache.unsent, orphans(cache, {shard.digest for shard in ledger.shards})
    if digests:
        with phase(progress, "looking for rows without a commit"):
            keys = ordered(packed(wanted))  # once: there may be thousands of shards, and millions of keys
            digests = [digest for digest in digests if _holds(made, digest, keys)]
    if digests:  # another process may have written commits meanwhile
        named = tasks_by_shard(cache)
        digests = [digest for digest in digests if digest not in named]
    if not digests:
        return []
    with progress("verifying", sum(_bytes(made, digest) for digest in digests), "bytes") as tick:
        return [shard for digest in digests if (shard := _adopted(cache, digest, tick)) is not None]


def _holds(cache: Cache, digest: str, wanted: Column) -> bool:
    """Whether a shard has any of the wanted keys, which are sorted; false if it cannot be read."""
    try:
        return bool(among(wanted, read_keys(cache, digest).view(KEY).reshape(-1)).any())
    except (CacheError, OSError):
        return False


def _bytes(cache: Cache, digest: str) -> int:
    """The bytes of a shard that can be read."""
    try:
        return tree_bytes(cache.shard(digest))
    except (CacheError, OSError):
        return 0


def _adopted(cache: Cache, digest: str, tick: Tick) -> Shard | None:
    with rows_kept(cache, digest) as locked:  # else another process has just finished with it, and nothing is damaged
        if not locked or verify_shard(cache.unsent, digest, tick=tick):
            return None
    try:
        return write_salvaged(cache, digest)
    except (CacheError, OSError):  # removed since it was verified
        return None


def write_salvaged(cache: Cache, digest: str) -> Shard:
    """Writes a commit for an intact shard that no commit names. Raises `CacheError`, `OSError` if it cannot be read."""
    shard, tasks = salvaged_tasks(cache.unsent, digest)
    for task in tasks:
        write_commit(cache, task, shard, [], {"salvaged": digest})
        written = read_commit(cache, task.key)
        if written is not None and written.shard == shard:
            break
    return shard


def salvaged_tasks(cache: Cache, digest: str) -> tuple[Shard, tuple[Task, Task]]:
    """A shard that no commit names, and two tasks whose commit can name it: the second is for where the first one has a
    commit that names another shard, with the same rows and other bytes. Raises `CacheError`, `OSError`.
    """
    field, shard = _stated(cache, digest)
    rows = [bytes(key).hex() for key in read_keys(cache, digest)]
    # The key of the original task, if the shard has all its rows: then a late original commit has the same name.
    keys = (digest_json({"kind": "task", "field": field, "rows": rows}),
            digest_json({"kind": "salvage", "meaning": 1, "field": field, "rows": rows, "shard": digest}))
    first, second = (Task(key=key, field=field, rows=tuple(rows)) for key in keys)
    return shard, (first, second)


def _stated(cache: Cache, digest: str) -> tuple[str, Shard]:
    """What the commit of an intact shard must state: its field, rows and bytes."""
    header = read_header(cache, digest)
    return header.field, Shard(digest=digest, rows=header.rows, bytes=tree_bytes(cache.shard(digest)))


def salvage(cache: Cache, digest: str) -> Shard | None:
    """Replaces a damaged shard by a shard of its good rows, with its own commit; None if no row could be saved.

    Keeps a shard that turns out intact, and one that lost only what follows from the rest (its shard index): then no
    row is lost, and manifests that name it stay valid. Also keeps a shard that cannot be read now, with its record.
    Every copied row is checked against its checksum again. A crash midway leaves both shards, and the next call
    finishes. Commits that name the old shard are removed before it, with the rejects in them. Raises `OSError` if
    nothing can be written (on a full disk, for example); then nothing is lost.
    """
    try:
        header, bad = _looked_at(cache, digest)
    except (CacheError, OSError) as error:
        if is_transient(error) or is_transient(error.__context__):
            return None
        new = None
    else:
        new = _saved(cache, digest, header, bad)
    if new is not None and new.digest == digest:
        forget(cache, digest)
        return new
    for task in list(cache.names("commits")):
        commit = read_commit(cache, task)
        if commit is not None and commit.shard is not None and commit.shard.digest == digest:
            atomic.remove_tree(cache.commit(task))
    retire_shard(cache, digest)
    return new


def _looked_at(cache: Cache, digest: str) -> tuple[Header, set[int]]:
    """The header of a shard, and the numbers of its bad rows. Raises `CacheError`, `OSError`."""
    root, header = cache.shard(digest), read_header(cache, digest)
    return header, {row for spec in header.arrays for row, _ in bad_rows(root, header, spec)}


def _saved(cache: Cache, digest: str, header: Header, bad: Collection[int]) -> Shard | None:
    """The replacement of a damaged shard; it has the same digest if the shard is intact or can be restored."""
    root = cache.shard(digest)
    if bad:
        return _copied(cache, digest, header, bad)
    if tree_digest(root) != digest:
        # If every row matches its checksum but the digest does not match, some rows belong to another shard.
        if _rebuilt_digest(root, header) != digest:
            return None
        _rewrite_indexes(cache, root, header)
    return Shard(digest=digest, rows=header.rows, bytes=tree_bytes(root))


def _rebuilt_digest(root: Path, header: Header) -> str:
    """The digest that the shard would have with its shard indexes rewritten."""
    listing = [{"path": shard_format.data_path(spec), "size": shard_format.data_bytes(spec, header.rows),
                "sha256": digest_parts(_data_of(root, header, spec))} for spec in header.arrays]
    mine = {entry["path"] for entry in listing}
    listing += [{"path": name, "size": size, "sha256": file_digest(root / name)}
                for name, size in tree(root) if name not in mine]
    return listing_digest(listing)


def _data_of(root: Path, header: Header, spec: ArraySpec) -> Iterator[Any]:
    """The bytes of an array's data file, with a correct shard index."""
    for row, _ in read_rows(root, header, spec):
        yield row.data
        yield shard_format.crc_bytes(row)
    yield shard_format.index(spec, header.rows)


def _rewrite_indexes(cache: Cache, root: Path, header: Header) -> None:
    """Atomically replaces each data file by one with a correct shard index."""
    for spec in header.arrays:
        with atomic.new_file(root / shard_format.data_path(spec), read_only=True, staging=cache.staging(),
                             mode=cache.file_mode, undo=False) as handle:
            for part in _data_of(root, header, spec):
                atomic.write(handle, part)


def _copied(cache: Cache, digest: str, header: Header, bad: Collection[int]) -> Shard | None:
    """Writes a shard of the good rows, and its commit; None if there are no good rows."""
    root, keys = cache.shard(digest), []
    with ShardWriter(cache, header.field, header.arrays) as writer:
        sources = [read_rows(root, header, spec) for spec in header.arrays]
        for number, (key, *rows) in enumerate(zip(header.keys, *sources, strict=True)):
            if number in bad or any(what for _, what in rows):
                continue
            keys.append(bytes(key).hex())
            writer.add(keys[-1], {spec.name: row.data for spec, (row, _) in zip(header.arrays, rows, strict=True)})
        if not keys:
            return None
        shard = writer.finish()
    _commit(cache, header.field, keys, shard, digest)
    return shard


def _commit(cache: Cache, field: str, rows: Sequence[str], shard: Shard, origin: str) -> None:
    key = digest_json({"kind": "salvage", "meaning": 1, "field": field, "rows": list(rows)})
    write_commit(cache, Task(key=key, field=field, rows=tuple(rows)), shard, [], {"salvaged": origin})
