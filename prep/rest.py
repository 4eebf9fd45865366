"""Which stamps of files are worth remembering: those of files at rest, where ctime is the time of the last change.

A file system's clock is two seconds coarse at worst, and a file written twice within one tick would look unchanged.
"""

from __future__ import annotations

import os

REST_NS = 2_000_000_000


def ctime_is_change() -> bool:
    """Whether ctime is the time of the last change here, and not that of creation: then a file could be replaced by
    one with the same stamp, and only what is named by its content may be trusted by stamp."""
    return os.name != "nt"
