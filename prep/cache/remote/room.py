"""Makes room for local copies: removes the shards that were least recently opened.

LATENTRY_REMOTE_LIMIT says how much all copies may take. Without it they may fill the disk but for a twentieth.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from prep.cache.store import Cache, retire_shard
from prep.errors import CacheError, ConfigError, PathError, Problem
from prep.formatting import format_bytes
from prep.fs import atomic
from prep.fs.mirror import DIRECTORY, WHOLE, mirror
from prep.fs.paths import MARKER
from prep.fs.tree import tree
from prep.fs.user_cache import make_private
from prep.parse import Unparsed, bytes_of

LIMIT = "LATENTRY_REMOTE_LIMIT"
SPARE = 20  # without a limit, one part in so many of the disk stays free
LOOKS = 3  # at the copies, before a download begins although those that were to go were opened meanwhile
RESCAN = 10.0  # seconds for which the measured room is believed: other processes fetch, too
STALE = 86400.0  # seconds after which a file in tmp/ is a leftover of a killed process


def make_dirs(path: Path) -> None:
    """Makes a directory of the mirror and its missing parents; the mirror itself is private.

    Raises `OSError`, and `PathError` if there can be no mirror.
    """
    if not mirror().is_dir():
        try:
            make_private(mirror())
        except OSError as error:
            raise PathError(f"{mirror()}, for local copies of what is in an object store, cannot be made: "
                            f"{error.strerror or error}",
                            hint=f"name another directory: export {DIRECTORY}=DIR") from None
    atomic.make_dirs(path)


def limit() -> int | None:
    """The most bytes that copies may take, if LATENTRY_REMOTE_LIMIT says so. Raises `ConfigError`."""
    text = os.environ.get(LIMIT)
    if not text:
        return None
    try:
        return bytes_of(text)
    except Unparsed as error:
        raise ConfigError(f"{LIMIT} {error}", hint=f"export {LIMIT}=200GB") from None


class Room:
    """How much room there is for copies, as measured a moment ago."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left, self._seen = 0, -RESCAN

    def make(self, size: int) -> None:
        """Removes the shards least recently opened until there is room for `size` bytes. Raises `CacheError`."""
        with self._lock:
            now = time.monotonic()
            if size > self._left or now - self._seen >= RESCAN:
                self._left, self._seen = _make_room(size), now
            self._left -= size

    def full(self, size: int) -> None:
        """After a full disk: as `make`, but removes at least so many bytes. Raises `CacheError`."""
        with self._lock:
            if _remove_oldest(_copies()[1], size) < size:
                raise _no_room(size, "the disk is full")
            self._seen = -RESCAN


ROOM = Room()


def _make_room(size: int) -> int:
    """Removes copies until there is room for `size` bytes; returns how much room there is."""
    make_dirs(mirror())
    for _ in range(LOOKS):
        used, copies = _copies()
        allowed = _allowed(used)
        if size > allowed:
            raise _no_room(size, "the disk is full" if limit() is None else f"{format_bytes(allowed)} are allowed")
        if used + size > allowed:
            used -= _remove_oldest(copies, used + size - allowed + allowed // 50)
        if used + size <= allowed:
            break
    return allowed - used


def allowed() -> int:
    """The most bytes that copies may take now, by the limit or the size of the disk."""
    make_dirs(mirror())
    return limit() or _allowed(_copies()[0])


def _allowed(used: int) -> int:
    disk, most = shutil.disk_usage(mirror()), limit()
    return max(used + disk.free - disk.total // SPARE, 0) if most is None else most


def _no_room(size: int, why: str) -> CacheError:
    return CacheError(f"there is no room for a shard of {format_bytes(size)} in {mirror()}: {why}",
                      hint=f"free some space, or name a directory on another disk with {DIRECTORY}=DIR, or allow more "
                      f"with {LIMIT}=200GB; then run the same command again")


def _copies() -> tuple[int, list[tuple[float, int, Path]]]:
    """The bytes of all copies, and of each shard when it was last opened, its bytes and its path."""
    found: list[tuple[float, int, Path]] = []
    for folder in _shard_folders(mirror() / WHOLE):
        for shard in folder.glob("??/*"):
            with contextlib.suppress(OSError):
                found.append((shard.stat().st_mtime, sum(size for _, size in tree(shard)), shard))
    return sum(size for _, size, _ in found), sorted(found)


def _shard_folders(top: Path) -> Iterator[Path]:
    """The directories of shards below `top`; removes leftovers of killed processes on the way."""
    for folder, names, _ in os.walk(top):
        if MARKER in os.listdir(folder):  # noqa: PTH208
            _remove_leftovers(Path(folder) / "tmp")
            names.clear()
            yield Path(folder) / "shards"


def _remove_leftovers(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for staged in folder.iterdir():
            if time.time() - staged.stat().st_mtime > STALE:
                atomic.remove_tree(staged)


def _remove_oldest(copies: Sequence[tuple[float, int, Path]], size: int) -> int:
    """Removes copies, those opened least recently first, until `size` bytes are free; returns how many are."""
    freed = 0
    for opened, taken, path in copies:
        if freed >= size:
            break
        with contextlib.suppress(OSError, Problem):
            if path.stat().st_mtime == opened:  # otherwise it was opened since, perhaps by another process
                retire_shard(Cache(root=path.parents[2]), path.name)
                freed += taken
    return freed
