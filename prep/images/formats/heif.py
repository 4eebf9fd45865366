"""Checks that an HEIC file is complete: its decoder accepts incomplete ones and leaves the missing parts black.

Phones store a picture as a grid of tiles, each an item of its own. libheif, as called here, skips tiles that are cut
off or overwritten. So this module looks up the location of each item (`iloc`, ISO/IEC 14496-12) and walks HEVC items
unit by unit: zeros or garbage in their place do not add up. Nothing is decoded.
"""

from __future__ import annotations

import struct

from prep.images.formats.isobmff import boxes
from prep.images.formats.parts import BadPicture

_Extents = dict[int, list[tuple[int, int]]]  # item → (start, end) in the file
_FILE, _IDAT = 0, 1  # the base that offsets are relative to
_MOST = 1 << 16  # a picture of 2^28 pixels in tiles of 128 needs a quarter of that


def check_whole(data: bytes) -> None:
    """Raises `BadPicture` for a file in which a part is missing or overwritten."""
    try:
        top_boxes = list(boxes(data, 0, len(data), "HEIC"))
        meta = next(((start, end) for kind, start, end in top_boxes if kind == b"meta"), None)
        if meta is None:
            raise BadPicture("unreadable", "HEIC file has no item, expected one picture at least")
        _check_items(data, {kind: (start, end) for kind, start, end in boxes(data, meta[0] + 4, meta[1], "HEIC")})
    except (struct.error, IndexError):
        raise BadPicture("corrupt-data", "the list of items of the HEIC file does not fit its box") from None


def _check_items(data: bytes, parts: dict[bytes, tuple[int, int]]) -> None:
    """Each item lies inside the file, and HEVC items consist of whole units."""
    if b"iloc" not in parts:
        raise BadPicture("unreadable", "HEIC file has no item, expected one picture at least")
    places = _places(data, *parts[b"iloc"], parts.get(b"idat", (0, 0))[0])
    for item, extents in places.items():
        last = max((end for _, end in extents), default=0)
        if last > len(data):
            raise BadPicture("truncated", f"item {item} of the HEIC file ends at byte {last} of {len(data)}")
    if sum(end - start for extents in places.values() for start, end in extents) > 4 * len(data):
        raise BadPicture("corrupt-data", "items of the HEIC file lie upon each other")
    kinds = _kinds(data, *parts[b"iinf"]) if b"iinf" in parts else {}
    width = _width(data, *parts[b"iprp"]) if b"iprp" in parts else None
    for item, extents in places.items():
        if kinds.get(item) == b"hvc1" and width and not _adds_up(data, extents, width):
            raise BadPicture("corrupt-data", f"item {item} of the HEIC file is no HEVC; damaged or overwritten")


def _places(data: bytes, start: int, stop: int, idat: int) -> _Extents:
    """The byte ranges of the items in this file."""
    version, sizes = data[start], struct.unpack_from(">H", data, start + 4)[0]
    offset_size, length_size, base_size, index_size = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    wide = version == 2
    at = start + 6
    count, at = _number(data, at, 4 if wide else 2)
    extents_of: _Extents = {}
    total = 0
    for _ in range(count):
        item, at = _number(data, at, 4 if wide else 2)
        method, at = _number(data, at, 2 if version else 0)
        base, at = _number(data, at + 2, base_size)
        extents, at = _number(data, at, 2)
        if (total := total + extents) > _MOST:
            raise BadPicture("corrupt-data", f"the HEIC file says that its items lie in more than {_MOST} places")
        for _ in range(extents):
            offset, at = _number(data, at + (index_size if version else 0), offset_size)
            length, at = _number(data, at, length_size)
            origin = {_FILE: 0, _IDAT: idat}.get(method & 15)
            if origin is not None:
                place = origin + base + offset
                extents_of.setdefault(item, []).append((place, place + length if length else len(data)))
        if at > stop:
            raise IndexError
    return extents_of


def _number(data: bytes, at: int, size: int) -> tuple[int, int]:
    """(the big-endian number in the first `size` bytes, the rest)."""
    return int.from_bytes(data[at : at + size], "big"), at + size


def _kinds(data: bytes, start: int, stop: int) -> dict[int, bytes]:
    """The kind of each item."""
    kinds = {}
    for kind, begin, end in boxes(data, start + (8 if data[start] else 6), stop, "HEIC"):
        version = data[begin]
        if kind == b"infe" and version >= 2 and end - begin >= 12:
            item, at = _number(data, begin + 4, 2 if version == 2 else 4)
            kinds[item] = data[at + 2 : at + 6]
    return kinds


def _width(data: bytes, start: int, stop: int) -> int | None:
    """The number of bytes of a unit's length; `None` unless all HEVC items of the file agree."""
    children = boxes(data, start, stop, "HEIC")
    store = next(((begin, end) for kind, begin, end in children if kind == b"ipco"), (stop, stop))
    widths = {(data[begin + 21] & 3) + 1 for kind, begin, end in boxes(data, *store, "HEIC")
              if kind == b"hvcC" and end - begin > 21}
    return widths.pop() if len(widths) == 1 else None


def _adds_up(data: bytes, extents: list[tuple[int, int]], width: int) -> bool:
    """Whether these bytes are units, each after its length, and nothing else."""
    whole = b"".join(data[start:end] for start, end in extents)
    at = 0
    while at + width < len(whole):
        length, at = _number(whole, at, width)
        if length < 2 or whole[at] & 0x80:  # a unit's head has two bytes, and its first bit is 0
            return False
        at += length
    return at == len(whole)
