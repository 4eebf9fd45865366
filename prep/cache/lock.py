"""Who may touch a cache: any number of writers, or one that removes things. A kernel lock, gone with its holder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from prep.cache.store import Cache
from prep.errors import CacheError


@contextmanager
def hold(cache: Cache, *, alone: bool) -> Iterator[None]:
    """Holds the cache's lock, shared with others who write or alone; it is not waited for.

    Raises `CacheError` when somebody else is in the way. On Windows, where Python has no such lock, writers are let in
    and nobody is alone.
    """
    if sys.platform == "win32":
        if alone:
            raise CacheError("this system has no lock that would keep other programs out of the cache")
        yield
        return
    import fcntl

    with (cache.root / "lock").open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_NB | (fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        except BlockingIOError:
            other = "is used by another program" if alone else "is being cleaned by another program"
            what = f"{cache.root} {other}, expected to have it"
            raise CacheError(what, hint="wait for it to end, and try again") from None
        yield
