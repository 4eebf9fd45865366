"""Reads blobs: whole files or ranges of them, on a disk or in an object store. Opening never blocks, not even on a
pipe without a writer.

An object is read by the command, by one request, and not by its workers: those parse what may be hostile within limits
of time, and waiting for a store may take longer. `fetched` gives what a worker needs.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO

from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket, is_object
from prep.fs.remote.objects import read_listed
from prep.fs.remote.retry import NEVER, side_by_side
from prep.fs.untrusted import NotRegularFile, read_bytes, stream_of

MOST_BYTES = 1 << 30  # of one file; the largest picture that is decoded takes 0.8 GB
MOST_FETCHED = 200 << 20  # bytes of an object, or a range of one, as it fits into a message to a worker
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_BINARY", "O_CLOEXEC", "O_NOINHERIT"))


class TooLarge(OSError):
    """A blob is larger than the limit for reading into memory."""


def error_code(error: OSError) -> str:
    """The finding code for a file that could not be read; one of findings.CODES."""
    if isinstance(error, NotRegularFile):
        return "special-file"
    return "too-large" if isinstance(error, TooLarge) else "unreadable-file"


def read_blob(blob: Blob, *, stop: threading.Event = NEVER) -> bytes:
    """All bytes of `blob`. Raises `OSError` if they cannot be read or the file ends before the range does; raises
    `TooLarge` and `NotRegularFile` before reading anything, `StoreError` if a store does not answer or refuses, and
    `Stopped` if `stop` is set while a store is waited for.
    """
    if is_object(blob.file):
        return _bytes_of(fetched(blob, stop=stop))
    descriptor = open_descriptor(blob.file)
    try:
        stat = os.fstat(descriptor)
        size = stat.st_size - blob.offset if blob.length is None else blob.length
        if size > MOST_BYTES:
            raise TooLarge(errno.EFBIG, f"it has {size} bytes, expected at most {MOST_BYTES}", blob.file)
        if blob.offset:
            os.lseek(descriptor, blob.offset, os.SEEK_SET)
        # Read past the stated size: the file may have grown, and files in /proc state none.
        data = read_bytes(descriptor, MOST_BYTES + 1 if blob.length is None else blob.length, size, blob.file)
    finally:
        os.close(descriptor)
    if len(data) > MOST_BYTES:
        raise TooLarge(errno.EFBIG, f"it has more than {MOST_BYTES} bytes", blob.file)
    if blob.length is not None and len(data) < blob.length:
        wanted = f"{blob.length} bytes from {blob.offset}"
        raise OSError(errno.EIO, f"file ends after {len(data)} of {wanted}", blob.file)
    return data


def fetched(blob: Blob, *, stop: threading.Event = NEVER) -> Blob:
    """A blob in a store with its bytes, or why it has none, and the version that was read; any other as it is.

    Raises `StoreError`; `Stopped` if `stop` is set while the store is waited for.
    """
    if not is_object(blob.file) or blob.data is not None or blob.fault is not None:
        return blob
    try:
        data, version = read_listed(blob.file, MOST_FETCHED, blob.offset, blob.length, stop=stop)
    except OSError as error:
        kind = TooLarge if error.errno == errno.EFBIG else OSError
        return replace(blob, fault=kind(error.errno, error.strerror, blob.file))
    return replace(blob, data=data, version=version)


def fetched_all(blobs: Iterable[Blob], jobs: int, *, stop: threading.Event) -> dict[Blob, Blob]:
    """Those of the blobs that are in stores, as `fetched` gives them, by `jobs` requests at a time.

    Raises `StoreError`, `Stopped`.
    """
    stored = [blob for blob in blobs if is_object(blob.file)]
    own = threading.Event()  # an error is of these alone
    return dict(zip(stored, side_by_side(partial(fetched, stop=stop), stored, jobs, own), strict=True))


def waits(blob: Blob) -> bool:
    """Whether reading it waits for answers, and many should be read at a time: it is in a store."""
    return is_object(blob.file)


def is_too_large(blob: Blob) -> bool:
    """Whether a blob is known to be larger than may be read into memory; of an object, reading it shows. Raises
    `OSError`."""
    if blob.length is None and is_object(blob.file):
        return False
    return (os.stat(blob.file).st_size if blob.length is None else blob.length) > MOST_BYTES  # noqa: PTH116  # as above


def _bytes_of(blob: Blob) -> bytes:
    if blob.fault is not None:
        raise blob.fault
    data = blob.data or b""
    if blob.length is not None and len(data) < blob.length:
        wanted = f"{blob.length} bytes from {blob.offset}"
        raise OSError(errno.EIO, f"object ends after {len(data)} of {wanted}", blob.file)
    return data


def open_descriptor(path: str) -> int:
    """Opens a regular file for reading; links are followed. Raises `OSError`, and `NotRegularFile` for anything else
    without blocking on a pipe."""
    descriptor = os.open(path, _FLAGS)  # os.open: making a Path would take longer than reading the file
    try:
        if not S_ISREG(mode := os.fstat(descriptor).st_mode):
            kind = "directory" if S_ISDIR(mode) else "pipe or a device"
            raise NotRegularFile(Path(path), f"is a {kind}, expected a regular file")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: Path) -> BinaryIO:
    """A regular file as a stream. Raises `OSError`, here and when reading."""
    return stream_of(open_descriptor(str(path)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """The location of some bytes: a whole file, or a range of one (a member of a tar); or an object in a store."""

    # The path, as str: making a `Path` takes longer than everything else a run without changes does with it. Of an
    # object its URL, as a listing gave it.
    file: str
    offset: int = 0
    length: int | None = None  # None: up to the end of the file
    member: str = ""  # name of the range in its tar; "": the blob is a whole file
    version: str = ""  # of an object: `ObjectEntry.version`; "": not known yet
    data: bytes | None = field(default=None, repr=False)  # of an object, if they were read
    fault: OSError | None = None  # why an object could not be read

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.file)

    @property
    def place(self) -> Place:
        """The file, or the object."""
        return Bucket.listed(self.file) if is_object(self.file) else Path(self.file)

    @property
    def name(self) -> str:
        """The file's name, or the member's, without its directory."""
        separator = "/" if is_object(self.file) else os.sep
        return self.member.rpartition("/")[2] or self.file.rpartition(separator)[2]


def blob_at(place: Place, name: str = "") -> Blob:
    """The file, or the object, at a place, or of this name below it."""
    return Blob(file=str(place / name))
