"""Is all of a PNG or JPEG there? Pillow leaves black, and libjpeg gray, what compressed data that end too early lack.

Both are looked at only where the last pixels of a decoded picture are of that colour, so that hardly any picture is
decoded twice.
"""

from __future__ import annotations

import struct
import zlib

from prep.images.formats.sniff import EOI, SOS, BadPicture, png_chunks, segments

STEP = 1 << 20  # bytes that are unpacked at a time
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the colour type of a PNG
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
# Between a scan's data and the marker after them it is passed over, unless pixels are lacking: then some come of it.
_FILL = bytes(range(128))


def check_png(body: bytes) -> None:
    """Raises `BadPicture` where a PNG's data are fewer than its header says."""
    width, height, depth, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", body, 16)
    wanted = sum(_bytes_of(-(-(width - left) // right), -(-(height - top) // down), depth * _CHANNELS[colour])
                 for left, top, right, down in (_PASSES if interlaced else ((0, 0, 1, 1),)))
    stream, there = zlib.decompressobj(), 0
    for kind, start, stop in png_chunks(body):
        data = body[start + 8 : stop - 4] if kind == b"IDAT" else b""
        while (most := min(STEP, wanted - there)) > 0:  # and not a byte more, which may be damaged
            plain = stream.decompress(data, most)
            there += len(plain)
            data = stream.unconsumed_tail
            if len(plain) < most:
                break
    if there < wanted:
        raise BadPicture("truncated", f"PNG has {there} of {wanted} bytes of pixels")


def _bytes_of(width: int, height: int, bits: int) -> int:
    """Of rows of pixels, each after the number of its filter."""
    return height * (1 + -(-width * bits // 8)) if width > 0 and height > 0 else 0


def filled(body: bytes) -> bytes:
    """A JPEG with a few bytes after the data of each scan: what is decoded is the same if all data were there."""
    parts, copied, scanning = [], 0, False
    for marker, start, _ in segments(body):
        if scanning:
            parts += [body[copied:start], _FILL]
            copied = start
        scanning = marker == SOS
    if scanning:  # it has no end marker
        parts += [body[copied:], _FILL, bytes([0xFF, EOI])]
        copied = len(body)
    return b"".join([*parts, body[copied:]])
