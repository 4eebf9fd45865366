"""Who may touch a cache: any number who use it, or one that removes things. A kernel lock, gone with its holder.

POSIX has `flock`, shared or alone. Python on Windows has only locks on bytes of a file, each for one holder; there
whoever shares takes any free one of `SLOTS` bytes, and whoever wants to be alone takes them all at a time. The package
`filelock` has neither: its lock of readers and writers is an SQLite database beside the file.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from prep.errors import CacheError

PATIENCE = 30.0  # seconds that prep gc, or the start of another encoder, may take
SLOTS = 512  # that many may share a cache on Windows
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
BUSY = (errno.EAGAIN, errno.EACCES)  # that others have the lock
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)  # some network file systems

Release = Callable[[], object]
LockBytes = Callable[[int, int, int, bool], bool]  # (descriptor, first byte, bytes, take or let go): whether that went


@contextmanager
def lock_directory(root: Path, *, exclusive: bool, patience: float = 0) -> Iterator[None]:
    """Holds the cache's lock, shared with others who use it or alone; waits for it for `patience` seconds.

    Raises `CacheError` when somebody else is in the way. In a cache that cannot be written and has no lock file yet,
    and on a disk that knows no locks, whoever shares is let in, and nobody is alone.
    """
    handle = _opened(root, exclusive)
    if handle is None:
        yield
        return
    with handle:
        release = _wait(root, handle, exclusive, time.monotonic() + patience)
        try:
            yield
        finally:
            release()


def _opened(root: Path, exclusive: bool) -> BinaryIO | None:
    try:
        return (root / "lock").open("ab")
    except OSError as error:
        if exclusive or error.errno not in READ_ONLY:
            raise
    try:
        return (root / "lock").open("rb")
    except OSError:
        return None


def _wait(root: Path, handle: BinaryIO, exclusive: bool, deadline: float) -> Release:
    while (release := _take(root, handle, exclusive)) is None:
        if time.monotonic() >= deadline:
            other = "is used by another program" if exclusive else "is being cleaned by another program"
            what = f"{root} {other}, expected to have it"
            raise CacheError(what, hint="wait for it to end, and try again")
        time.sleep(0.05)
    return release


def _take(root: Path, handle: BinaryIO, exclusive: bool) -> Release | None:
    """What lets go of the lock that was taken, or None when others have it."""
    try:
        return try_lock(handle, exclusive)
    except OSError as error:
        if error.errno in BUSY:
            return None
        if error.errno not in NO_LOCKS:
            raise
    if exclusive:
        raise CacheError(f"{root} is on a disk without locks, so nothing can say whether others use it",
                         hint="move the cache to a local disk to remove things from it")
    return lambda: None


def try_byte_lock(handle: BinaryIO, exclusive: bool, lock: LockBytes) -> Release | None:
    """Takes one free byte, or all when `exclusive`; None when there is none. `lock` is the system's."""
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
        """Takes the lock and returns what lets go of it; None, or `OSError`, when others have it."""
        return try_byte_lock(handle, exclusive, _lock_bytes)

else:
    import fcntl

    def try_lock(handle: BinaryIO, exclusive: bool) -> Release | None:
        """Takes the lock and returns what lets go of it; None, or `OSError`, when others have it."""
        fcntl.flock(handle, fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH))
        return lambda: None  # it goes with the open file
