"""Splits a JPEG into segments: drops what does not decide pixels, and finds where its data end."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from prep.formatting import counted
from prep.images.formats.parts import BadPicture, Note, PictureParts

# Decoders skip it between a scan's data and the next marker, unless pixels are missing: then it becomes some.
_FILL = bytes(range(128))
_SOI, EOI, SOS, _DQT, _APP0, _APP1, _APP2, _APP14, _COM = 0xD8, 0xD9, 0xDA, 0xDB, 0xE0, 0xE1, 0xE2, 0xEE, 0xFE
# D0-D7 restart inside a scan, FF 00 is a stuffed FF. One literal first: `re` then searches eight times as fast.
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)
_ICC, _EXIF = b"ICC_PROFILE\0", b"Exif\0\0"


def pad_scans(body: bytes) -> bytes:
    """A JPEG with a few bytes appended to each scan: it decodes to the same pixels only if no data were missing."""
    parts, copied, scanning = [], 0, False
    for marker, start, _ in segments(body):
        if scanning:
            parts += [body[copied:start], _FILL]
            copied = start
        scanning = marker == SOS
    if scanning:  # no end marker
        parts += [body[copied:], _FILL, bytes([0xFF, EOI])]
        copied = len(body)
    return b"".join([*parts, body[copied:]])


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each segment after SOI, including the marker's own bytes; EOI comes last, if present."""
    position = 2
    while match := _MARKER.search(data, position):
        marker, start = match[1][0], match.end() - 2
        if marker == EOI:
            yield marker, start, start + 2
            return
        if start + 4 > len(data):
            return
        length = struct.unpack_from(">H", data, start + 2)[0]
        position = start + 2 + max(length, 2)
        yield marker, start, min(position, len(data))


def luminance_table(data: bytes) -> tuple[int, ...]:
    """The 64 divisors of table 0, by which encoders quantize luminance; empty if `data` is no JPEG or has none."""
    if not data.startswith(bytes([0xFF, _SOI])):
        return ()
    for marker, start, stop in segments(data):
        if marker == SOS:
            break
        position = start + 4
        while marker == _DQT and position < stop:
            wide, name = data[position] >> 4, data[position] & 15  # 16-bit divisors or not; the table's number
            end = position + 1 + (128 if wide else 64)
            if end <= stop and name == 0:
                return struct.unpack_from(">64H" if wide else ">64B", data, position + 1)
            position = end
    return ()


def unwrap_jpeg(data: bytes) -> PictureParts:
    """A JPEG without APP1-13 and comments; the Adobe segment stays, since it decides the colors."""
    pieces: list[bytes] = [data[:2]]
    chunks: dict[int, bytes] = {}
    exif: bytes | None = None
    copied, end, scans, bits = 2, None, 0, 8
    for marker, start, stop in segments(data):
        payload = data[start + 4 : stop] if _APP1 <= marker <= _APP2 else b""
        if payload.startswith(_EXIF) and exif is None:
            exif = payload[len(_EXIF) :]
        elif payload.startswith(_ICC) and len(payload) > 14:
            chunks[payload[12]] = payload[14:]
        if _APP0 < marker < _APP14 or marker == 0xEF or marker == _COM:
            pieces.append(data[copied:start])
            copied = stop
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC) and stop > start + 4:
            bits = data[start + 4]
        scans += marker == SOS
        end = stop if marker == EOI else None
    if not scans:
        raise BadPicture("truncated", f"JPEG ends inside its header, after {len(data)} bytes")
    pieces.append(data[copied:end])
    profile = b"".join(chunks[number] for number in sorted(chunks)) or None
    return PictureParts(format="JPEG", body=b"".join(pieces), exif=exif, profile=profile, frames=1, bits=bits,
                        notes=_jpeg_ending(len(data), end))


def _jpeg_ending(length: int, end: int | None) -> tuple[Note, ...]:
    if end is None:
        return (("missing-eoi", "the end-of-image marker is missing; the file may have been cut off"),)
    if end < length:
        return (("trailing-data", f"{counted(length - end, 'byte')} after the end of the picture"),)
    return ()
