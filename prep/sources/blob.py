"""The bytes of a blob, wherever they lie."""

from __future__ import annotations

import errno
import os

from prep.records import Blob

MOST_BYTES = 1 << 30  # of one file; the most pixels that are decoded take 0.8 GB


class TooLarge(OSError):
    """A blob has more bytes than are ever read into memory."""


def code_of(error: OSError) -> str:
    """The finding's code for a file that could not be read; one of codes.CODES."""
    return "too-large" if isinstance(error, TooLarge) else "unreadable-file"


def read_blob(blob: Blob) -> bytes:
    """All bytes of `blob`. Raises `OSError` when they cannot be read, or when the file ends before the range does;
    `TooLarge` before anything is read.
    """
    with open(blob.file, "rb") as stream:  # noqa: PTH123  (a Path of each file would take longer than reading it)
        size = os.fstat(stream.fileno()).st_size - blob.offset if blob.length is None else blob.length
        if size > MOST_BYTES:
            raise TooLarge(errno.EFBIG, f"it has {size} bytes, expected at most {MOST_BYTES}", str(blob.path))
        stream.seek(blob.offset)
        data = stream.read() if blob.length is None else stream.read(blob.length)
    if blob.length is not None and len(data) < blob.length:
        wanted = f"{blob.length} bytes from {blob.offset}"
        raise OSError(errno.EIO, f"file ends after {len(data)} of {wanted}", str(blob.path))
    return data
