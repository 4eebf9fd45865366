"""The bytes of a blob, wherever they lie."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from prep.fs.untrusted import NotRegularFile

MOST_BYTES = 1 << 30  # of one file; the most pixels that are decoded take 0.8 GB


class TooLarge(OSError):
    """A blob has more bytes than are ever read into memory."""


def error_code(error: OSError) -> str:
    """The finding's code for a file that could not be read; one of codes.CODES."""
    if isinstance(error, NotRegularFile):
        return "special-file"
    return "too-large" if isinstance(error, TooLarge) else "unreadable-file"


def read_blob(blob: Blob) -> bytes:
    """All bytes of `blob`. Raises `OSError` when they cannot be read, or when the file ends before the range does;
    `TooLarge`, `NotRegularFile` before anything is read.
    """
    # Not a Path of each file, which would take longer than reading it.
    with open(blob.file, "rb", opener=_without_waiting) as stream:
        stat = os.fstat(stream.fileno())
        if not S_ISREG(stat.st_mode):
            raise NotRegularFile(blob.path, "is a pipe or a device, expected a regular file")
        size = stat.st_size - blob.offset if blob.length is None else blob.length
        if size > MOST_BYTES:
            raise TooLarge(errno.EFBIG, f"it has {size} bytes, expected at most {MOST_BYTES}", str(blob.path))
        stream.seek(blob.offset)
        data = stream.read() if blob.length is None else stream.read(blob.length)
    if blob.length is not None and len(data) < blob.length:
        wanted = f"{blob.length} bytes from {blob.offset}"
        raise OSError(errno.EIO, f"file ends after {len(data)} of {wanted}", str(blob.path))
    return data


def _without_waiting(path: str, flags: int) -> int:
    """Opens as `open` does, but for a pipe: that waits for who writes into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """Where some bytes lie: a whole file, or a range of one (a member of a tar)."""

    file: str  # the file's path; a `Path` of it takes longer to make than all that a run without news does with it
    offset: int = 0
    length: int | None = None  # None: up to the end of the file
    member: str = ""  # what the range is called in its tar; "": the blob is a whole file

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.file)

    @property
    def name(self) -> str:
        """The file's name, or the member's, without its directory."""
        return self.member.rpartition("/")[2] or self.file.rpartition(os.sep)[2]
