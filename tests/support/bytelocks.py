"""Windows' locks on bytes, played by Linux: each for one open file, gone with it. `lock.way = way` switches them on."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import BinaryIO

from prep.fs import lock

POSSIBLE = hasattr(fcntl, "F_OFD_SETLK")


def lock_bytes(descriptor: int, start: int, count: int, take: bool) -> bool:
    """What `msvcrt.locking` does with LK_NBLCK or LK_UNLCK from byte `start` on."""
    kind = fcntl.F_WRLCK if take else fcntl.F_UNLCK
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, start, count, 0))
    except BlockingIOError:
        return False
    return True


def way(handle: BinaryIO, alone: bool) -> lock.Release | None:
    """`lock.way` as Windows has it."""
    return lock.try_byte_lock(handle, alone, lock_bytes)
