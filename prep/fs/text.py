"""Reads text files that people write: UTF-8, with or without the byte order mark that Windows editors add."""

from __future__ import annotations

import codecs
import errno
from pathlib import Path

from prep.fs.blob import TooLarge, open_file
from prep.parse import Unparsed

MOST_BYTES = 1 << 24  # of a recipe or settings; even one that lists every directory by hand has a hundredth of that


def read_text(path: Path, *, most: int = MOST_BYTES, regular: bool = False) -> str:
    """The text of a small file. Raises `OSError`; `TooLarge` above `most` bytes; `Unparsed` if it is not UTF-8.

    The file may be a pipe: `train run -c <(make-settings)`. `regular` accepts only a regular file, for paths that come
    from another file.
    """
    with open_file(path) if regular else path.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise TooLarge(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return decode_text(data)


def decode_text(data: bytes, wanted: str = "UTF-8 text") -> str:
    """The text in `data`, without its byte order mark. Raises `Unparsed`, which names `wanted`, if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unparsed(f"byte {error.start} is not UTF-8, expected {wanted}") from None


def without_mark(data: bytes) -> bytes:
    """`data` without the UTF-8 byte order mark, if it starts with one."""
    return data.removeprefix(codecs.BOM_UTF8)
