"""Locks on a cache: any number of users share it, or one process that removes things has it to itself.

What is locked is the cache's marker, `latentry.json`: a cache without it is no cache, so nobody deletes it while the
cache is in use. Earlier versions lock the file CACHE/lock, and so do we, after the marker: deleting that one lets
nobody in. After a lock is taken, the file is compared with the one that has its name now, and the lock taken again
where it was replaced. The kernel releases locks when their process ends.

POSIX has `flock`, shared or exclusive. Python on Windows can only lock bytes of a file, each for one holder: a user
takes any free one of `SLOTS` bytes, and whoever wants the cache alone takes them all. Windows locks CACHE/lock only:
a locked byte cannot be read there, and an open file cannot be deleted. The package `filelock` has neither kind of lock:
its lock of readers and writers is an SQLite database beside the file.
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
from typing import IO, BinaryIO

from prep.errors import CacheError
from prep.fs.atomic import set_mode, shared_file_mode
from prep.fs.paths import MARKER

PATIENCE = 30.0  # seconds that prep gc, or the start of another encoder, may take
SLOTS = 512  # that many may share a cache on Windows
LOCKED = ("lock",) if sys.platform == "win32" else (MARKER, "lock")  # in this order
TRIES = 100  # after which a file that is replaced again and again is given up
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
BUSY = (errno.EAGAIN, errno.EACCES)  # another process has the lock
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)  # some NFS disks

Release = Callable[[], object]
LockBytes = Callable[[int, int, int, bool], bool]  # (descriptor, first byte, bytes, take or release): success


@contextmanager
def lock_directory(root: Path, *, exclusive: bool, patience: float = 0) -> Iterator[None]:
    """Holds the locks of the cache at `root`, shared or exclusive; waits up to `patience` seconds for others.

    Raises `CacheError` when another process is in the way, or when `exclusive` is asked for in a cache that cannot be
    written. On a disk without locks users are let in, and nobody gets the cache alone.
    """
    if exclusive and not os.access(root, os.W_OK):
        raise CacheError(f"{root} cannot be written, so nothing can be removed from it",
                         hint="check the permissions of the cache, and whether its disk is mounted read-only")
    deadline = time.monotonic() + patience
    with ExitStack() as held:
        for name in LOCKED:
            held.enter_context(_locked(root, name, exclusive, deadline))
        yield


@contextmanager
def _locked(root: Path, name: str, exclusive: bool, deadline: float) -> Iterator[None]:
    """Holds the lock of one file, where there is such a file or it can be made."""
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
    """The file to lock: writable, as some network disks want it for exclusive locks, or else only to be read.

    The marker is never made here; CACHE/lock is, for all who may read the cache. `None` where there is no file.
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
    """Whether `path` still names the open file: a lock on one that was deleted or replaced keeps nobody out."""
    mine = os.fstat(handle.fileno())
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)


def _wait(root: Path, handle: BinaryIO, exclusive: bool, deadline: float) -> Release:
    while (release := _take(root, handle, exclusive)) is None:
        if time.monotonic() >= deadline:
            other = "is in use by another process" if exclusive else "is being cleaned by another process"
            raise CacheError(f"{root} {other}", hint="wait for it to finish, then try again")
        time.sleep(0.05)
    return release


def _take(root: Path, handle: BinaryIO, exclusive: bool) -> Release | None:
    """Releases the lock that was taken; `None` when others have it."""
    try:
        return try_lock(handle, exclusive)
    except OSError as error:
        if error.errno in BUSY:
            return None
        if error.errno not in NO_LOCKS:
            raise
    if exclusive:
        raise CacheError(f"{root} is on a disk without locks, so it is not known whether others use it",
                         hint="move the cache to a local disk to remove things from it")
    return lambda: None


def try_byte_lock(handle: BinaryIO, exclusive: bool, lock: LockBytes) -> Release | None:
    """Takes one free byte, or all when `exclusive`; `None` when there is none. `lock` is the system's."""
    mine = os.getpid() % SLOTS  # so that those who share seldom ask for the same
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

    def try_lock(handle: BinaryIO, exclusive: bool) -> Release | None:
        """Takes the lock and returns its release; `None`, or `OSError`, when others have it."""
        return try_byte_lock(handle, exclusive, _lock_bytes)

else:
    import fcntl

    def try_lock(handle: BinaryIO, exclusive: bool) -> Release | None:
        """Takes the lock and returns its release; `None`, or `OSError`, when others have it."""
        fcntl.flock(handle, fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH))
        return lambda: None  # closing the file releases it
