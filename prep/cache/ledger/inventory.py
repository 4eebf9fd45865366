"""Takes inventory of a cache's commits, shards and rows: checks every stamp, reads only what the look-up file lacks.

Counted as missing: a commit without its shard; a shard of the wrong size, without intact keys, with anything but
regular files in it, or of another field than its commit states; rows with a damage record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prep.cache.commits import Commit, read_commit
from prep.cache.damage import Damage, recorded
from prep.cache.ledger.columns import KEY, Column, Columns, gather, merge, select
from prep.cache.ledger.index import EMPTY_INDEX, Entry, Lookup, is_known_layout, save_index
from prep.cache.records import Shard
from prep.cache.shard_format import parse_group
from prep.cache.shard_header import read_document, read_keys
from prep.cache.store import SUFFIX, Cache
from prep.errors import CacheError
from prep.fs.stamps import Stamp, Tree, _of_file, ctime_is_reliable, list_tree, path_stamp, tree_stamp
from prep.fs.untrusted import entries
from prep.parse import Unparsed, digest_of

WORTH = 64  # changed commits and shards; reading that many takes 25 ms, as long as writing the file for 500,000 rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The commits and shards of a cache at the time of the count."""

    commits: tuple[Commit, ...]  # sorted by task
    shards: tuple[tuple[Shard, str], ...]  # those with an intact row, and their fields; sorted by digest
    counts: tuple[int, ...]  # intact rows of each
    columns: Columns  # their rows


@dataclass(frozen=True, slots=True)
class _Rows:
    """The intact rows of a shard."""

    count: int
    entry: Entry | None  # None: must not be remembered
    read: tuple[Column, Column] | None  # keys and rows; None: as in the look-up file


_NONE = _Rows(0, None, None)


def take_inventory(cache: Cache, known: Lookup, *, remember: bool) -> Inventory:
    """Takes inventory of a cache; `remember` rewrites the look-up file if much changed since `known`.

    Raises `CacheError` for a commit of another version.
    """
    commits = list(_commits(cache, known))
    named = {commit.shard.digest: (commit.shard, commit.field) for _, commit in commits if commit.shard is not None}
    damaged = set(cache.names("damaged")) if cache.store is None else set()  # of copies, which are fetched again
    fans = {fan.name: fan.path for fan in entries(cache.root / cache.headers) if fan.is_dir(follow_symlinks=False)}
    shards: dict[str, _Rows] = {}
    for digest in sorted(digest for digest in named if digest[:2] in fans):
        damages = recorded(cache, digest) if digest in damaged else ()
        root = f"{fans[digest[:2]]}{os.sep}{digest}"  # Cache.shard would check each directory for links: 25 µs
        rows = _rows(cache, known, named[digest][0], damages, root)
        if rows.count:
            shards[digest] = rows
    columns = _columns(known, shards)
    if remember:
        _remember(cache, known, commits, shards, columns)
    return Inventory(commits=tuple(commit for _, commit in commits), shards=tuple(named[digest] for digest in shards),
                     counts=tuple(rows.count for rows in shards.values()), columns=columns)


def sound_rows(cache: Cache, shard: Shard) -> int:
    """How many rows of a shard are intact, without the look-up file."""
    damages = recorded(cache, shard.digest) if cache.store is None else ()
    return _rows(cache, EMPTY_INDEX, shard, damages, cache.header_path(shard.digest)).count


def _commits(cache: Cache, known: Lookup) -> Iterator[tuple[bytes | None, Commit]]:
    """Every intact commit, with the stamp to remember it by, or None."""
    trusted = ctime_is_reliable()
    for task, before in commit_stamps(cache):
        stamp, commit = known.commits.get(task, (None, None))
        if trusted and commit is not None and before is not None and before.digest == stamp:
            yield stamp, commit
            continue
        commit = read_commit(cache, task)
        if commit is not None and is_of_its_field(cache, commit):
            yield _stamp_to_keep(before, _file_stamp(cache, task)), commit


def is_of_its_field(cache: Cache, commit: Commit) -> bool:
    """Whether the commit's field is that of its shard; true for an unreadable shard, which is detected elsewhere."""
    if commit.shard is None:
        return True
    try:
        return parse_group(read_document(cache.header_path(commit.shard.digest)), "zarr.json") == commit.field
    except (OSError, Unparsed, CacheError):
        return True


def _rows(cache: Cache, known: Lookup, shard: Shard, damages: Sequence[Damage], root: str) -> _Rows:
    entry = known.shards.get(shard.digest)
    before = None if entry is None else _tree_stamp(root, entry.tree)
    if entry is not None and before is not None and before.digest == entry.stamp and not damages:
        return _Rows(entry.rows, entry, None) if _is_whole(cache, before, shard) else _NONE
    tree = _tree(root)
    before = _tree_stamp(root, tree)
    if before is None or not _is_whole(cache, before, shard) or any(damage.row is None for damage in damages):
        return _NONE
    try:
        keys = read_keys(cache, shard.digest).view(KEY).reshape(-1)
    except CacheError:
        return _NONE
    rows, bad = np.arange(len(keys), dtype=np.int32), {damage.row for damage in damages}
    if bad:
        rows = rows[[row not in bad for row in range(len(keys))]]
        return _Rows(len(rows), None, (keys[rows], rows))
    stamp = _stamp_to_keep(before, _tree_stamp(root, tree))
    entry = Entry(stamp, len(rows), tree) if stamp is not None and is_known_layout(tree) else None
    return _Rows(len(rows), entry, (keys, rows))


def _is_whole(cache: Cache, stamp: Stamp, shard: Shard) -> bool:
    """Whether a shard has its size; in a store, it had when its header came here."""
    return cache.store is not None or stamp.bytes == shard.bytes


def _columns(known: Lookup, shards: Mapping[str, _Rows]) -> Columns:
    """The rows of all shards, which are numbered by their position in `shards`."""
    places = {digest: place for place, (digest, rows) in enumerate(shards.items()) if rows.read is None}
    columns = known.columns
    if len(places) < len(known.shards) or len(places) < len(shards):
        columns = select(columns, np.array([places.get(digest, -1) for digest in known.shards], np.int32))
    parts = [(place, *rows.read) for place, rows in enumerate(shards.values()) if rows.read is not None]
    return merge(columns, gather(parts)) if parts else columns


def _remember(cache: Cache, known: Lookup, commits: Sequence[tuple[bytes | None, Commit]],
              inventory: Mapping[str, _Rows], columns: Columns) -> None:
    """Writes the look-up file if enough entries are new or outdated."""
    entries = {commit.task: (stamp, commit) for stamp, commit in commits if stamp is not None}
    shards = {digest: rows.entry for digest, rows in inventory.items() if rows.entry is not None}
    changed = sum(known.commits.get(task, (None,))[0] != stamp for task, (stamp, _) in entries.items())
    changed += sum(inventory[digest].read is not None for digest in shards)
    changed += len(known.commits.keys() - entries.keys()) + len(known.shards.keys() - shards.keys())
    if changed < WORTH:
        return
    if len(shards) < len(inventory):
        numbers = {digest: number for number, digest in enumerate(shards)}
        columns = select(columns, np.array([numbers.get(digest, -1) for digest in inventory], np.int32))
    save_index(cache, Lookup(commits=entries, shards=shards, columns=columns))


def _tree(root: str) -> Tree:
    try:
        return list_tree(root) or ()
    except OSError:
        return ()


def _tree_stamp(root: str, tree: Tree) -> Stamp | None:
    try:
        return tree_stamp(root, tree) if tree else None
    except OSError:
        return None


def _file_stamp(cache: Cache, task: str) -> Stamp | None:
    try:
        return path_stamp(cache.commit(task))
    except OSError:
        return None


def _stamp_to_keep(before: Stamp | None, after: Stamp | None) -> bytes | None:
    """The stamp of what was read between two stamps; None if it changed or was not at rest."""
    return before.digest if before is not None and before == after and before.at_rest() else None


def commit_stamps(cache: Cache) -> Iterator[tuple[str, Stamp | None]]:
    """The tasks that have a commit, sorted, each with its stamp; None if the commit is not a regular file."""
    suffix = SUFFIX["commits"]
    for fan in entries(cache.root / "commits"):
        for entry in entries(Path(fan.path)) if fan.is_dir(follow_symlinks=False) else ():
            try:
                task = digest_of(entry.name.removesuffix(suffix), "commits")
                if entry.name.startswith(fan.name) and entry.name.endswith(suffix):
                    plain = entry.is_file(follow_symlinks=False)
                    yield task, _of_file(entry.stat(follow_symlinks=False)) if plain else None
            except (Unparsed, FileNotFoundError):  # not a commit, or removed meanwhile
                continue
