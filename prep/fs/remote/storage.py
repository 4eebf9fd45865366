"""Reads and writes small documents at a place, on this computer or in a store, by one function for both."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prep.errors import CacheError
from prep.fs.atomic import write_atomic
from prep.fs.blob import open_file
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import create_object, list_folder, read_object, read_range, replace_object
from prep.fs.remote.retry import NEVER
from prep.fs.text import TooLarge, read_small
from prep.fs.untrusted import read_up_to

TRIES = 3  # at writing what reads back as something else


def read(place: Place, most: int) -> bytes:
    """The bytes of a regular file, or of an object. Raises `OSError`, `TooLarge` above `most` bytes, `StoreError`."""
    if isinstance(place, Path):
        return read_small(place, most=most, regular=True)
    try:
        return read_object(place.url, most)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise TooLarge(errno.EFBIG, f"it has more than {most} bytes", str(place)) from None


def read_start(place: Place, most: int, *, stop: threading.Event = NEVER) -> bytes:
    """The first `most` bytes of a regular file, or of an object. Raises `OSError`, `StoreError`."""
    if isinstance(place, Bucket):
        return read_range(place.url, 0, most, stop=stop)
    with open_file(place) as stream:
        return read_up_to(stream, most)


def files_in(place: Place, wanted: Callable[[str], object], most: int) -> dict[str, int]:
    """The sizes, in bytes, of the first `most` files or objects directly in a place whose names are `wanted`, by name.

    Raises `OSError`, `StoreError`.
    """
    if isinstance(place, Bucket):
        listed = list_folder(place.url)
        return {name: listed[name] for name in [*filter(wanted, listed)][:most]}
    sizes = dict[str, int]()
    for name in sorted(filter(wanted, os.listdir(place)))[:most]:  # noqa: PTH208  # quicker
        with suppress(OSError):  # removed meanwhile
            status = (place / name).stat()
            if stat.S_ISREG(status.st_mode):
                sizes[name] = status.st_size
    return sizes


def put(place: Place, data: bytes, *, staging: Path | None = None) -> None:
    """Writes `data`, unless it is there: on a disk atomically, by way of `staging`, as `write_atomic`; in a store it is
    read back. Raises `OSError`, `CacheError`."""
    if isinstance(place, Bucket):
        create_object(place.url, data)
    for _ in range(TRIES):
        if _is_there(place, data):
            return
        if isinstance(place, Path):
            write_atomic(place, data, staging=staging)
            return
        replace_object(place.url, data)
    if not _is_there(place, data):
        raise CacheError(f"{place} does not read back as it was written", hint="run the same command again")


def _is_there(place: Place, data: bytes) -> bool:
    if isinstance(place, Path) and not place.is_file():
        return False
    try:
        return read(place, len(data)) == data
    except (FileNotFoundError, TooLarge):
        return False
