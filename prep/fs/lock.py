"""Locks a cache: shared by any number of users, or exclusive for a process that removes things.

The lock is on the cache's marker, `latentry.json`: without it the directory is not a cache, so nobody deletes it while
the cache is in use. Earlier versions lock the file CACHE/lock, so this version locks it, too, after the marker;
deleting CACHE/lock therefore lets nobody in. After taking a lock, the locked file is compared with the file that has
its name now; if it was replaced, the lock is taken again. The kernel releases locks when their process ends.

POSIX has `flock`, shared or exclusive. Python on Windows can only lock bytes of a file, each for one holder: a shared
lock takes any free one of `SLOTS` bytes, an exclusive lock takes all of them. Windows locks CACHE/lock only: there, a
locked byte cannot be read and an open file cannot be deleted. The package `filelock` offers neither kind of lock: its
readers-writer lock is an SQLite database beside the file.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from prep.errors import CacheError
from prep.fs.atomic import set_mode, shared_file_mode
from prep.fs.paths import MARKER

PATIENCE = 30.0  # seconds to wait for prep gc, or for the start of another encoder
SLOTS = 512  # processes that may share a cache on Windows
LOCKED = ("lock",) if sys.platform == "win32" else (MARKER, "lock")  # in this order
TRIES = 100  # attempts to lock a file that is replaced again and again
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
BUSY = (errno.EAGAIN, errno.EACCES)  # another process has the lock
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)  # some NFS disks

class Opened(Protocol):
    """An open file, or on POSIX an open directory."""

    def fileno(self) -> int: ...


Release = Callable[[], object]
LockBytes = Callable[[int, int, int, bool], bool]  # (descriptor, first byte, bytes, take or release): success


@contextmanager
def lock_directory(root: Path, *, exclusive: bool, patience: float = 0) -> Iterator[None]:
    """Holds the locks of the cache at `root`, shared or exclusive; waits up to `patience` seconds for others.

    Raises `CacheError` if another process holds a conflicting lock, or if `exclusive` is requested for a cache that is
    not writable. On a disk without file locks, shared access is granted and exclusive access refused.
    """
    if exclusive and not os.access(root, os.W_OK):
        raise CacheError(f"{root} cannot be written, so nothing can be removed from it",
                         hint="check the permissions of the cache, and whether its disk is mounted read-only")
    deadline = time.monotonic() + patience
    with ExitStack() as locks:
        for name in LOCKED:
            locks.enter_context(_locked(root, name, exclusive, deadline))
        yield


@contextmanager
def _locked(root: Path, name: str, exclusive: bool, deadline: float) -> Iterator[None]:
    """Holds the lock of one file, if the file exists or can be made."""
    for _ in range(TRIES):
        handle = _opened(root / name, exclusive)
        if handle is None:
            yield
            return
        with handle:
            release = _wait(root, handle, exclusive, deadline)
            try:
                if is_current(handle, root / name):
                    yield
                    return
            finally:
                release()
    raise CacheError(f"{root / name} was replaced {TRIES} times while it was being locked",
                     hint="stop whatever deletes or replaces files in the cache, then try again")


def _opened(path: Path, exclusive: bool) -> BinaryIO | None:
    """Opens the file to lock: writable if possible, because some network disks need that for exclusive locks.

    Never creates the marker; creates CACHE/lock, for all who may read the cache. `None` if there is no file.
    """
    try:
        if path.name != MARKER:
            handle = path.open("ab")
            set_mode(handle.fileno(), shared_file_mode(path.parent))
            return handle
        if exclusive:
            return path.open("r+b")
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
    try:
        return path.open("rb")
    except OSError:
        return None


def is_current(handle: IO[bytes], path: Path) -> bool:
    """Whether `path` still names the open file: a lock on a deleted or replaced file keeps nobody out."""
    mine = os.fstat(handle.fileno())
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)


def _wait(root: Path, handle: BinaryIO, exclusive: bool, deadline: float) -> Release:
    while (release := _take(root, handle, exclusive)) is None:
        if time.monotonic() >= deadline:
            raise CacheError(f"{root} is in use by another process" if exclusive else
                             f"{root} is being cleaned by another process",
                             hint="wait for it to finish, then try again")
        time.sleep(0.05)
    return release


def _take(root: Path, handle: Opened, exclusive: bool) -> Release | None:
    """Takes the lock and returns its release; `None` if another process holds it."""
    try:
        return try_lock(handle, exclusive)
    except OSError as error:
        if error.errno in BUSY:
            return None
        if error.errno not in NO_LOCKS:
            raise
    if exclusive:
        raise CacheError(f"{root} is on a disk without locks, so other processes that use it cannot be detected",
                         hint="move the cache to a local disk, then try again")
    return lambda: None


def try_exclusive(handle: Opened) -> Release | None:
    """Takes the exclusive lock and returns its release; `None` if another has it. On a disk without locks, all get it.
    """
    try:
        return try_lock(handle, True)
    except OSError as error:
        return (lambda: None) if error.errno in NO_LOCKS else None


def try_byte_lock(handle: Opened, exclusive: bool, lock: LockBytes) -> Release | None:
    """Takes one free byte, or all bytes if `exclusive`; `None` if that fails. `lock` is the system's function."""
    mine = os.getpid() % SLOTS  # so that processes rarely try the same byte first
    tries = [(0, SLOTS)] if exclusive else [((mine + step) % SLOTS, 1) for step in range(SLOTS)]
    for start, count in tries:
        if lock(handle.fileno(), start, count, True):
            return partial(lock, handle.fileno(), start, count, False)
    return None


if sys.platform == "win32":
    import msvcrt

    def _lock_bytes(descriptor: int, start: int, count: int, take: bool) -> bool:
        os.lseek(descriptor, start, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK if take else msvcrt.LK_UNLCK, count)
        except PermissionError:
            return False
        return True

    def try_lock(handle: Opened, exclusive: bool) -> Release | None:
        """Takes the lock and returns its release; `None`, or `OSError`, when others have it."""
        return try_byte_lock(handle, exclusive, _lock_bytes)

else:
    import fcntl

    def try_lock(handle: Opened, exclusive: bool) -> Release | None:
        """Takes the lock and returns its release; `None`, or `OSError`, when others have it."""
        fcntl.flock(handle, fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH))
        return lambda: None  # closing the file releases it
