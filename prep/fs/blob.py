"""Reads blobs: whole files or ranges of them. Opening never blocks, not even on a pipe without a writer."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from prep.fs.untrusted import NotRegularFile, read_bytes, stream_of

MOST_BYTES = 1 << 30  # of one file; the largest picture that is decoded takes 0.8 GB
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_BINARY", "O_CLOEXEC", "O_NOINHERIT"))


class TooLarge(OSError):
    """A blob is larger than the limit for reading into memory."""


def error_code(error: OSError) -> str:
    """The finding code for a file that could not be read; one of findings.CODES."""
    if isinstance(error, NotRegularFile):
        return "special-file"
    return "too-large" if isinstance(error, TooLarge) else "unreadable-file"


def read_blob(blob: Blob) -> bytes:
    """All bytes of `blob`. Raises `OSError` if they cannot be read or the file ends before the range does; raises
    `TooLarge` and `NotRegularFile` before reading anything.
    """
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


def open_descriptor(path: str) -> int:
    """Opens a regular file for reading; links are followed. Raises `OSError`, and `NotRegularFile` for anything else
    without blocking on a pipe."""
    descriptor = os.open(path, _FLAGS)  # os.open: making a Path would take longer than reading the file
    try:
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegularFile(Path(path), "is a pipe or a device, expected a regular file")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: Path) -> BinaryIO:
    """A regular file as a stream. Raises `OSError`, here and when reading."""
    return stream_of(open_descriptor(str(path)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """The location of some bytes: a whole file, or a range of one (a member of a tar)."""

    file: str  # the path, as str: making a `Path` takes longer than everything else a run without changes does with it
    offset: int = 0
    length: int | None = None  # None: up to the end of the file
    member: str = ""  # name of the range in its tar; "": the blob is a whole file

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.file)

    @property
    def name(self) -> str:
        """The file's name, or the member's, without its directory."""
        return self.member.rpartition("/")[2] or self.file.rpartition(os.sep)[2]
