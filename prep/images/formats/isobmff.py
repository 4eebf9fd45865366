"""The boxes of a file (ISO/IEC 14496-12): the container of HEIC, and often of JPEG XL."""

from __future__ import annotations

from collections.abc import Iterator

from prep.images.formats.parts import BadPicture


def boxes(data: bytes, start: int, stop: int, what: str) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of the contents of each box from `start` to `stop`; `what` names the format in messages.

    Raises `BadPicture` for a box that does not fit.
    """
    while start + 8 <= stop:
        length, begin = int.from_bytes(data[start : start + 4], "big"), start + 8
        if length == 1:
            length, begin = int.from_bytes(data[begin : begin + 8], "big"), begin + 8
        end = start + length if length else stop
        if end < begin:
            raise BadPicture("corrupt-data", f"the {what} box at byte {start} is shorter than its own head")
        if end > stop:
            raise BadPicture("truncated", f"the {what} box at byte {start} has {stop - start} of its {length} bytes")
        yield data[start + 4 : start + 8], begin, end
        start = end
