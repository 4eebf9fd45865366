"""Splits a PNG into chunks, and checks that its pixel data are complete: Pillow leaves missing pixels black.

The check runs only if the last pixels of the decoded picture are black, so that hardly any picture is inflated twice.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from prep.formatting import counted
from prep.images.formats.parts import BadPicture, Note, PictureParts

_PNG_KEPT = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
_PROFILE_LIMIT = 1 << 24  # bytes; the largest CMYK profiles in use have about 3 MB
_TEXT_LIMIT = 1 << 20  # bytes of a compressed comment; Pillow's limit, too

STEP = 1 << 20  # bytes to inflate at a time
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by PNG color type
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def check_complete(body: bytes) -> None:
    """Raises `BadPicture` if a PNG has less pixel data than its header says."""
    width, height, depth, color, _, _, interlaced = struct.unpack_from(">IIBBBBB", body, 16)
    expected = sum(_bytes_of(-(-(width - left) // right), -(-(height - top) // down), depth * _CHANNELS[color])
                   for left, top, right, down in (_PASSES if interlaced else ((0, 0, 1, 1),)))
    stream, size = zlib.decompressobj(), 0
    for kind, start, stop in png_chunks(body):
        data = body[start + 8 : stop - 4] if kind == b"IDAT" else b""
        while (most := min(STEP, expected - size)) > 0:  # and no byte more, which may be damaged
            plain = stream.decompress(data, most)
            size += len(plain)
            data = stream.unconsumed_tail
            if len(plain) < most:
                break
    if size < expected:
        raise BadPicture("truncated", f"PNG has {size} of {expected} bytes of pixels")


def _bytes_of(width: int, height: int, bits: int) -> int:
    """The size of rows of pixels, each with its filter byte."""
    return height * (1 + -(-width * bits // 8)) if width > 0 and height > 0 else 0


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of each complete chunk, including length and checksum."""
    position = 8
    while position + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if position + 12 + length > len(data):
            return
        yield kind, position, position + 12 + length
        position += 12 + length
        if kind == b"IEND":
            return


def unwrap_png(data: bytes) -> PictureParts:
    """The PNG with only its critical chunks and tRNS; a bad checksum of another chunk is a note, not an error."""
    pieces: list[bytes | memoryview] = [data[:8]]
    view, notes = memoryview(data), []
    payloads: dict[bytes, bytes] = {}
    end = None
    for kind, start, stop in png_chunks(data):
        good = zlib.crc32(view[start + 4 : stop - 4]) == int.from_bytes(view[stop - 4 : stop], "big")
        if not good:
            notes.append(_png_checksum(kind))
        if kind in _PNG_KEPT:
            pieces.append(view[start:stop])
        elif good and kind in (b"eXIf", b"iCCP", b"acTL"):
            payloads[kind] = data[start + 8 : stop - 4]
        elif kind in (b"zTXt", b"iTXt") and _expands(data[start + 8 : stop - 4]):
            notes.append(("metadata-bomb", f"a compressed comment has more than {_TEXT_LIMIT} bytes; it is ignored"))
        if kind == b"IHDR" and stop - start == 25:
            payloads[kind] = data[start + 8 : stop - 4]
        end = stop if kind == b"IEND" else None
    if b"IHDR" not in payloads or end is None:
        raise BadPicture("truncated", f"PNG ends before its last chunk, after {len(data)} bytes")
    if end < len(data):
        notes.append(("trailing-data", f"{counted(len(data) - end, 'byte')} after the end of the picture"))
    profile, frames = _png_profile(payloads.get(b"iCCP"), notes), payloads.get(b"acTL", b"")
    return PictureParts(format="PNG", body=b"".join(pieces), exif=payloads.get(b"eXIf"), profile=profile,
                        bits=payloads[b"IHDR"][8], frames=int.from_bytes(frames[:4], "big") or 1,
                        notes=tuple(dict.fromkeys(notes)))


def _png_checksum(kind: bytes) -> Note:
    name = kind.decode("latin-1")
    if kind in _PNG_KEPT and kind != b"IDAT":
        raise BadPicture("bad-checksum", f"checksum of chunk {name} does not match")
    return "bad-checksum", f"checksum of chunk {name} does not match its data"


def _inflate(data: bytes, limit: int) -> bytes | None:
    """The inflated `data`; None if it is damaged or larger than `limit` bytes."""
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, limit)
    except zlib.error:
        return None
    return plain if stream.eof else None


def _expands(text: bytes) -> bool:
    """Whether this compressed text chunk expands beyond a sane comment."""
    start = text.find(b"\x78", text.find(b"\0"))  # 78: the first byte of a zlib stream
    if len(text) < 1024 or start < 0:
        return False
    try:
        return len(zlib.decompressobj().decompress(text[start:], _TEXT_LIMIT)) >= _TEXT_LIMIT
    except zlib.error:
        return False


def _png_profile(chunk: bytes | None, notes: list[Note]) -> bytes | None:
    if chunk is None:
        return None
    profile = _inflate(chunk[chunk.find(b"\0") + 2 :], _PROFILE_LIMIT)
    if profile is None:
        notes.append(("invalid-profile", "the embedded color profile cannot be unpacked; taken as sRGB"))
    return profile
