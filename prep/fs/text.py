"""Text files that people write: UTF-8, with the byte order mark that Windows editors put first, or without it."""

from __future__ import annotations

import codecs
import errno
from pathlib import Path

from prep.fs.blob import TooLarge, open_file
from prep.parse import Unparsed

MOST_BYTES = 1 << 24  # of a recipe or settings; those of people who list every directory by hand have a hundredth


def read_text(path: Path, *, most: int = MOST_BYTES, regular: bool = False) -> str:
    """The text of a small file. Raises `OSError`; `TooLarge` for more than `most` bytes; `Unparsed` unless it is UTF-8.

    The user may name a pipe: `train run -c <(make-settings)`. `regular` opens nothing but a regular file, for paths
    that come from another file.
    """
    with open_file(path) if regular else path.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise TooLarge(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return decode_text(data)


def decode_text(data: bytes, wanted: str = "UTF-8 text") -> str:
    """The text in `data`, without its byte order mark. Raises `Unparsed` with what was `wanted` unless it is UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unparsed(f"byte {error.start} is not UTF-8, expected {wanted}") from None


def without_mark(data: bytes) -> bytes:
    """`data` without the byte order mark of UTF-8, where it begins with one."""
    return data.removeprefix(codecs.BOM_UTF8)
