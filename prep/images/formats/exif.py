"""Reads the orientation tag of untrusted EXIF, and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from prep.images.formats.parts import Note


def orientation_of(exif: bytes | None) -> tuple[int, tuple[Note, ...]]:
    """The orientation tag (1-8) of an EXIF block; 1 with a note when the block or the tag is invalid, 1 when absent."""
    if exif is None:
        return 1, ()
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 10:
        return 1, (("exif-invalid", "the EXIF block has no valid header; taken as upright"),)
    offset = struct.unpack_from(order + "I", exif, 4)[0]
    if offset + 2 > len(exif):
        return 1, (("exif-invalid", "the EXIF directory lies outside its block; taken as upright"),)
    count = struct.unpack_from(order + "H", exif, offset)[0]
    whole = min(count, (len(exif) - offset - 2) // 12)
    value = next(_orientations(exif, order, offset + 2, whole), 1)
    if whole < count:
        note = "exif-invalid", f"the EXIF block claims {count} entries and has room for {whole}"
        return checked_orientation(value)[0], (note,)
    return checked_orientation(value)


def checked_orientation(value: object) -> tuple[int, tuple[Note, ...]]:
    """`value` if it is 1 to 8; otherwise 1 and a note."""
    if isinstance(value, int) and 1 <= value <= 8:
        return value, ()
    return 1, (("exif-invalid", f"EXIF orientation is {value}, expected 1 to 8; taken as upright"),)


def _orientations(exif: bytes, order: str, start: int, count: int) -> Iterator[int]:
    for position in range(start, start + 12 * count, 12):
        tag, kind, number = struct.unpack_from(order + "HHI", exif, position)
        if tag == 0x0112 and number == 1 and kind in (3, 4):
            yield struct.unpack_from(order + ("H" if kind == 3 else "I"), exif, position + 8)[0]
