"""Publishes shards and tables in a cache atomically, and removes them: staged, synced, renamed.

Objects are synced before anything names them; a crash leaves only leftovers in tmp/.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prep.cache.store import SUFFIX, Cache
from prep.fs import atomic
from prep.fs.tree import file_digest, tree_digest
from prep.fs.untrusted import entries

# Files of earlier versions in a cache's root. Never opened: SQLite deletes files that are named by a journal there.
EARLIER = (*(f"facts.sqlite{end}" for end in ("", "-journal", "-wal", "-shm")), "lookup.bin")
SETTLED = 3600.0  # seconds after which every system has written new names by itself; Linux does within 30
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def publish_dir(cache: Cache, staged: Path, digest: str) -> Path:
    """Moves a staged and synced shard to its name. Keeps an intact shard that is already there; replaces a damaged one.

    Removes the shard's damage record in both cases.
    """
    _move_in(cache, staged, digest)
    atomic.remove_tree(cache.damaged(digest))
    return cache.shard(digest)


def _move_in(cache: Cache, staged: Path, digest: str) -> None:
    target = cache.shard(digest)
    cache.make_dirs(target.parent)
    if target.exists() and not _is_whole(target, digest):
        _move_out(cache, target)
    try:
        if not target.exists():
            atomic.rename(staged, target)
    except OSError:
        if not _is_whole(target, digest):  # otherwise another process was quicker, with the same bytes
            raise
    atomic.remove_tree(staged)
    atomic.sync_dir(target.parent)  # also after another process's rename: it may have died before its sync


def _move_out(cache: Cache, target: Path) -> None:
    """Renames a shard out of the way in one step, then deletes it.

    A full disk may have no room for another name: then the shard is deleted in place, its first document first.
    """
    aside = cache.root / "tmp" / secrets.token_hex(16)
    try:
        cache.staging()
        atomic.rename(target, aside)
        atomic.sync_dir(target.parent)
    except FileNotFoundError:  # another process was quicker
        return
    except OSError as error:
        if error.errno not in FULL:
            raise
        aside = target
    atomic.remove_tree(aside)


def publish_table(cache: Cache, parts: Callable[[], Iterable[atomic.Buffer]]) -> str:
    """Stores a table read-only under the digest of its bytes and returns it; replaces a damaged file of that name.

    `parts` is called twice, for the digest and for the file, so that a large table is never in memory as a whole.
    """
    running = hashlib.sha256()
    for part in parts():
        running.update(part)
    publish_parts(cache, digest := running.hexdigest(), parts())
    return digest


def publish_parts(cache: Cache, digest: str, parts: Iterable[atomic.Buffer]) -> bool:
    """Stores a table that comes in parts, as `publish_table`; returns False, and stores nothing, if it is another one.

    Takes no part of a table that is there.
    """
    if (target := _lacking(cache, digest)) is None:
        return True
    running = hashlib.sha256()
    with contextlib.suppress(_Another), atomic.new_file(target, read_only=True, staging=cache.staging(),
                                                        mode=cache.file_mode, undo=False) as handle:
        for part in parts:
            atomic.write(handle, part)
            running.update(part)
        if running.hexdigest() != digest:
            raise _Another
    return running.hexdigest() == digest


class _Another(Exception):
    """The parts are those of another table."""


def _lacking(cache: Cache, digest: str) -> Path | None:
    """Where a table is to be written; `None` if it is there, whole."""
    target = cache.table(digest)
    cache.make_dirs(target.parent)
    if _is_whole(target, digest, file_digest):
        atomic.sync_dir(target.parent)  # its writer may have died before its sync
        return None
    atomic.remove_directory_in_way(target)
    return target


def retire_shard(cache: Cache, digest: str) -> None:
    """Removes a shard and its damage record: renames the shard in one step, then deletes it."""
    target = cache.shard(digest)
    if target.exists():
        _move_out(cache, target)
    atomic.remove_tree(cache.damaged(digest))


def sync_recent_directories(cache: Cache) -> None:
    """Syncs every directory with recent names to the disk, because their writers may have died before that.

    Without it, a run could build on the results of a killed run, and a power failure could still remove those.
    """
    since = time.time() - SETTLED
    folders = [cache.root, *(cache.root / kind for kind in ("shards", *SUFFIX))]
    for folder in [*folders, *(cache.root / "shards").glob("??"), *(cache.root / "commits").glob("??")]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if folder.stat().st_mtime > since:
                atomic.sync_dir(folder)


def leftovers(cache: Cache) -> list[Path]:
    """Leftovers of crashes in tmp/, and files of earlier versions, which nothing reads any more. Raises `OSError`."""
    staged = [Path(entry.path) for entry in entries(cache.root / "tmp")]
    return staged + [path for name in EARLIER if os.path.lexists(path := cache.root / name)]


def clear_leftovers(cache: Cache) -> None:
    """Removes tmp/ and files of earlier versions; needs the exclusive lock. Keeps what cannot be removed."""
    for name in ("tmp", *EARLIER):
        with contextlib.suppress(OSError):  # another user's, for example, or a marker being created
            atomic.remove_tree(cache.root / name)


def _is_whole(target: Path, digest: str, digest_of_all: Callable[[Path], str] = tree_digest) -> bool:
    try:
        return digest_of_all(target) == digest
    except OSError:
        return False
