"""The bytes of a blob, wherever they lie."""

from __future__ import annotations

import errno

from prep.records import Blob


def read_blob(blob: Blob) -> bytes:
    """All bytes of `blob`. Raises `OSError` when they cannot be read, or when the file ends before the range does."""
    with blob.path.open("rb") as stream:
        stream.seek(blob.offset)
        data = stream.read() if blob.length is None else stream.read(blob.length)
    if blob.length is not None and len(data) < blob.length:
        wanted = f"{blob.length} bytes from {blob.offset}"
        raise OSError(errno.EIO, f"file ends after {len(data)} of {wanted}", str(blob.path))
    return data
