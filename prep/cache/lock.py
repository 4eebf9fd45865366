"""Who may touch a cache: any number of writers, or one that removes things. A kernel lock, gone with its holder."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from prep.cache.store import Cache
from prep.errors import CacheError


@contextmanager
def hold(cache: Cache, *, alone: bool, patience: float = 0) -> Iterator[None]:
    """Holds the cache's lock, shared with others who write or alone; waits for it for `patience` seconds.

    Raises `CacheError` when somebody else is in the way. On Windows, where Python has no such lock, writers are let in
    and nobody is alone. In a cache that cannot be written, nobody can be in the way of a reader.
    """
    if sys.platform == "win32":
        if alone:
            raise CacheError("this system has no lock that would keep other programs out of the cache")
        yield
        return
    import fcntl

    try:
        handle = (cache.root / "lock").open("ab")
    except OSError as error:
        if alone or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        yield
        return
    with handle:
        deadline = time.monotonic() + patience
        while not _locked(fcntl.flock, handle, fcntl.LOCK_NB | (fcntl.LOCK_EX if alone else fcntl.LOCK_SH)):
            if time.monotonic() >= deadline:
                other = "is used by another program" if alone else "is being cleaned by another program"
                what = f"{cache.root} {other}, expected to have it"
                raise CacheError(what, hint="wait for it to end, and try again")
            time.sleep(0.05)
        yield


def _locked(flock: Callable[[BinaryIO, int], None], handle: BinaryIO, how: int) -> bool:
    try:
        flock(handle, how)
    except BlockingIOError:
        return False
    return True
