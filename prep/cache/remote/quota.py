"""Makes room for local copies: removes the shards that were least recently opened.

LATENTRY_REMOTE_LIMIT says how much all copies may take, tables included, which stay. Without it they may fill the disk
but for a twentieth. A shard counts in full from the moment its download begins, for all processes that have their
copies in the same directory, and so does a table.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from prep.cache.publish import retire_shard
from prep.cache.store import Cache
from prep.errors import CacheError, ConfigError, PathError, Problem
from prep.formatting import format_bytes
from prep.fs import atomic
from prep.fs.lock import BUSY, try_exclusive, try_lock
from prep.fs.paths import MARKER
from prep.fs.remote.copies import COMING, DIRECTORY, EARLIER, LIMIT, WHOLE, mirror
from prep.fs.remote.errors import Stopped
from prep.fs.tree import tree_bytes
from prep.fs.user_cache import make_private
from prep.parse import Unparsed, bytes_of

SPARE = 20  # without a limit, one part in so many of the disk stays free
LOOKS = 3  # at the copies, before a download begins although those that were to go were opened meanwhile
RESCAN = 10.0  # seconds for which the measured room is believed
PAUSE = 0.2  # seconds between looks whether downloads that take all the room have ended
STALE = 86400.0  # seconds after which a file in tmp/ is a leftover of a killed process


class NotFetched(CacheError):
    """No copy of a shard could be made or kept here; its rows may be whole in the store."""


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


class Quota:
    """How much room there is for copies, as this or another process measured it a moment ago."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def make(self, size: int) -> None:
        """Removes the shards least recently opened until there is room for `size` bytes. Raises `CacheError`."""
        with self._alone() as known:
            _note(known, _measured(known, size), size)

    @contextlib.contextmanager
    def reserved(self, size: int, stop: threading.Event) -> Iterator[None]:
        """Makes room for `size` bytes, which nobody else takes until the block ends; waits while downloads take it.

        Raises `CacheError`, `Stopped`.
        """
        while (coming := self._begun(size)) is None:
            if stop.wait(PAUSE):
                raise Stopped
        try:
            yield
        finally:
            coming.close()  # first: Windows removes no open file
            atomic.remove(Path(coming.name))

    def _begun(self, size: int) -> BinaryIO | None:
        """The file of a download for which there is room; `None` if other downloads take it."""
        with self._alone() as known:
            under_way, most = _under_way(), limit()
            if under_way and most is not None and size <= most < size + under_way:
                return None
            room = _measured(known, size)
            if under_way and room.free < size:
                return None
            _note(known, room, size)
            coming = (known.parent / f"{secrets.token_hex(8)}-{size}").open("xb")
            with contextlib.suppress(OSError):  # a disk without locks: nobody believes the file
                try_lock(coming, True)
            return coming

    def full(self, size: int) -> None:
        """After a full disk: as `make`, but removes at least so many bytes. Raises `CacheError`."""
        with self._alone() as known:
            if _remove_oldest(_copies()[1], size) < size:
                raise _no_room(size, "the disk is full")
            atomic.remove(known)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Path]:
        """Holds the lock of the room; gives the file that says how much was left."""
        folder = mirror() / COMING
        make_dirs(folder)
        with self._lock, (folder / "lock").open("ab") as handle:
            while (release := try_exclusive(handle)) is None:
                time.sleep(0.01)
            try:
                yield folder / "room"
            finally:
                release()


QUOTA = Quota()


class _Measured(NamedTuple):
    """What was measured, less what was taken since."""

    at: float  # seconds since 1970
    free: int  # bytes; below 0: nothing could be removed for what was taken


def _measured(known: Path, size: int) -> _Measured:
    """The room as it was noted a moment ago, if that is enough for `size` bytes; else as it is after removing copies.
    """
    with contextlib.suppress(OSError, ValueError):
        at, free, most = known.read_text(encoding="ascii").split()
        if 0 <= time.time() - float(at) < RESCAN and most == str(limit()) and size <= int(free):
            return _Measured(float(at), int(free))
    now = time.time()
    return _Measured(now, _make_room(size))


def _note(known: Path, room: _Measured, taken: int = 0) -> None:
    with contextlib.suppress(OSError):  # a full disk: half a line matches no limit, so it is measured again
        known.write_text(f"{room.at!r} {room.free - taken} {limit()}", encoding="ascii")


def _make_room(size: int) -> int:
    """Removes copies until there is room for `size` bytes; returns how much there is: less if downloads take it."""
    _remove_earlier()
    for _ in range(LOOKS):
        under_way = _under_way()  # first: a download that ends meanwhile counts twice, and not never
        used, copies = _copies()
        allowed = _allowed(used)
        stays = used - sum(taken for _, taken, _ in copies)
        if size > allowed - stays:
            tables = f", of which tables take {format_bytes(stays)}" if stays else ""
            raise _no_room(size, "the disk is full" if limit() is None else
                           f"{format_bytes(allowed)} are allowed{tables}")
        free = allowed - used - under_way
        if free < size:
            free += _remove_oldest(copies, size - free + allowed // 50)
        if free >= size:
            break
    return free


def _under_way() -> int:
    """The bytes of the shards whose downloads are under way; forgets those of processes that have ended."""
    total = 0
    for path in (mirror() / COMING).glob("*-*"):
        size = path.name.rpartition("-")[2]
        if size.isdecimal() and _is_locked(path):
            total += int(size)
        else:
            atomic.remove(path)
    return total


def _is_locked(path: Path) -> bool:
    """Whether a process has a file locked; False on a disk without locks, where a killed process would count for ever.
    """
    try:
        with path.open("r+b") as handle:
            release = try_lock(handle, True)
            if release is not None:
                release()
            return release is None
    except OSError as error:
        return error.errno in BUSY


def quota() -> int:
    """The most bytes that copies may take now, by the limit or the size of the disk."""
    make_dirs(mirror())
    return limit() or _allowed(_copies()[0])


def _allowed(used: int) -> int:
    disk, most = shutil.disk_usage(mirror()), limit()
    return max(used + disk.free - disk.total // SPARE, 0) if most is None else most


def _no_room(size: int, why: str) -> NotFetched:
    return NotFetched(f"there is no room for {format_bytes(size)} in {mirror()}: {why}",
                      hint=f"free some space, or name a directory on another disk with {DIRECTORY}=DIR, or allow more "
                      f"with {LIMIT}=200GB; then run the same command again")


def _remove_earlier() -> None:
    """Removes what earlier versions kept beside the copies, unless one of them may be running. Nobody reads it."""
    for root in (root for kind in EARLIER for root in _caches(mirror() / kind)):
        with contextlib.suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in (root, *root.iterdir())) > STALE:
                atomic.remove_tree(root)


def _copies() -> tuple[int, list[tuple[float, int, Path]]]:
    """The bytes of all copies, and of each shard when it was last opened, its bytes and its path."""
    shards: list[tuple[float, int, Path]] = []
    tables = 0
    for root in _caches(mirror() / WHOLE):
        for shard in root.glob("shards/??/*"):
            with contextlib.suppress(OSError):
                shards.append((shard.stat().st_mtime, tree_bytes(shard), shard))
        for table in root.glob("tables/??/*"):
            with contextlib.suppress(OSError):
                tables += table.stat().st_size
    return tables + sum(size for _, size, _ in shards), sorted(shards)


def _caches(top: Path) -> Iterator[Path]:
    """The copies of caches below `top`; removes leftovers of killed processes on the way."""
    for folder, names, files in os.walk(top):
        if MARKER in files:
            remove_leftovers(Path(folder) / "tmp")
            names.clear()
            yield Path(folder)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left in the tmp/ of a copy."""
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
