"""What a picture file says before any decoder sees it: format, the parts worth decoding, EXIF, faults of the wrapping.

`unwrap(data)` gives a `Parts`. For JPEG and PNG, `body` is the file rebuilt from what decides the pixels: EXIF,
comments, thumbnails and animation frames are left out, so that no decoder can trip over them, expand them or warn about
them. A fault that leaves the picture usable is a note (code, detail); one that does not raises `BadPicture`. Linear in
the file's size; allocates no pixels.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

Note = tuple[str, str]  # (code of codes.CODES, what was seen)


class BadPicture(Exception):
    """A picture cannot be used; becomes a finding of severity error. `code` is one of codes.CODES."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class NoDecoder(BadPicture):
    """The decoder is an extra that is not installed: nothing is wrong with the picture, so this is never remembered."""

    def __init__(self, what: str, *, package: str, extra: str) -> None:
        super().__init__("unsupported-format", f"is {what}, which needs the package {package}, which is not installed; "
                         f"left out: pip install 'latentry[{extra}]' reads it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """One picture file, unwrapped."""

    format: str  # JPEG PNG WEBP BMP TIFF GIF AVIF HEIC JXL
    body: bytes  # what the decoder gets
    exif: bytes | None  # None: none, or the format's decoder reads it
    profile: bytes | None  # ICC; the same
    frames: int | None  # the same
    bits: int | None  # per channel as stored; the same
    notes: tuple[Note, ...]


_SIGNATURES: tuple[tuple[str, bytes], ...] = (
    ("JPEG", rb"\xff\xd8\xff"),
    ("PNG", rb"\x89PNG\r\n\x1a\n"),
    ("WEBP", rb"RIFF....WEBP"),
    ("GIF", rb"GIF8[79]a"),
    ("TIFF", rb"II\*\0|MM\0\*|II\+\0|MM\0\+"),
    ("AVIF", rb"....ftyp(?:avif|avis)|....ftypmif1.{8,24}avi[fs]"),
    ("HEIC", rb"....ftyp(?:hei[cmxs]|hev[cxms]|mif1|msf1)"),
    ("JXL", rb"\xff\x0a|\0\0\0\x0cJXL "),
    ("BMP", rb"BM....\0\0\0\0"),
)

# What else people have under a picture's name; these are told apart only to name them.
_STRANGERS: tuple[tuple[str, bytes], ...] = (
    ("JPEG 2000", rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"),
    ("Photoshop", rb"8BPS"),
    ("PDF", rb"%PDF"),
    ("SVG", rb"\s*(?:<\?xml[^>]*>\s*)?<svg"),
    ("a web page", rb"(?i)\s*(?:<!doctype html|<html)"),
    ("a macOS side file", rb"\0\x05\x16\x07"),
    ("a zip archive", rb"PK\x03\x04"),
    ("a video", rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI "),
)

READABLE = "JPEG, PNG, WebP, AVIF, HEIC, JPEG XL, BMP, TIFF or GIF"


def sniff(data: bytes) -> str:
    """The format of `data` by its first bytes. Raises `BadPicture` naming what it is instead, where that is known."""
    if not data:
        raise BadPicture("empty-file", "file has 0 bytes")
    for name, pattern in _SIGNATURES:
        if re.match(pattern, data[:64], re.DOTALL):
            return name
    for name, pattern in _STRANGERS:
        if re.match(pattern, data[:256], re.DOTALL):
            raise BadPicture("not-an-image", f"file is {name}, expected {READABLE}")
    stripped = data[:64].lstrip(b"\r\n\t \0")
    if stripped != data[:64] and re.match(rb"\xff\xd8\xff|\x89PNG|GIF8", stripped):
        stray = min(len(data), 64) - len(stripped)
        raise BadPicture("not-an-image", f"{stray} stray bytes lie before the picture's signature")
    raise BadPicture("not-an-image", f"file starts with {data[:8]!r}, expected {READABLE}")


def unwrap(data: bytes) -> Parts:
    """The parts of a picture file. Raises `BadPicture`: not a picture, or its frame is broken."""
    kind = sniff(data)
    if kind == "JPEG":
        return _unwrap_jpeg(data)
    if kind == "PNG":
        return _unwrap_png(data)
    return Parts(format=kind, body=data, exif=None, profile=None, frames=None, bits=None, notes=())


# ---- JPEG ------------------------------------------------------------------------------------------------------------

_SOI, EOI, SOS, _APP0, _APP1, _APP2, _APP14, _COM = 0xD8, 0xD9, 0xDA, 0xE0, 0xE1, 0xE2, 0xEE, 0xFE
# D0-D7 restart inside a scan, FF 00 is a stuffed FF. One literal first: `re` then searches eight times as fast.
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)
_ICC, _EXIF = b"ICC_PROFILE\0", b"Exif\0\0"


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each segment after SOI, the marker's own bytes included; EOI comes last, if at all."""
    position = 2
    while found := _MARKER.search(data, position):
        marker, start = found[1][0], found.end() - 2
        if marker == EOI:
            yield marker, start, start + 2
            return
        if start + 4 > len(data):
            return
        length = struct.unpack_from(">H", data, start + 2)[0]
        position = start + 2 + max(length, 2)
        yield marker, start, min(position, len(data))


def _unwrap_jpeg(data: bytes) -> Parts:
    """A JPEG without APP1-13 and comments; the Adobe segment stays, it decides the colours."""
    kept: list[bytes] = [data[:2]]
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
            kept.append(data[copied:start])
            copied = stop
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC) and stop > start + 4:
            bits = data[start + 4]
        scans += marker == SOS
        end = stop if marker == EOI else None
    if not scans:
        raise BadPicture("truncated", f"JPEG ends inside its header, after {len(data)} bytes")
    kept.append(data[copied:end])
    profile = b"".join(chunks[number] for number in sorted(chunks)) or None
    return Parts(format="JPEG", body=b"".join(kept), exif=exif, profile=profile, frames=1, bits=bits,
                 notes=_jpeg_ending(len(data), end))


def _jpeg_ending(length: int, end: int | None) -> tuple[Note, ...]:
    if end is None:
        return (("missing-eoi", "the end-of-image marker is missing; the file may have been cut off"),)
    if end < length:
        return (("trailing-data", f"{length - end} bytes follow the end of the picture"),)
    return ()


# ---- PNG -------------------------------------------------------------------------------------------------------------

_PNG_KEPT = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
_PROFILE_LIMIT = 1 << 24  # bytes; the largest CMYK profiles in use have about 3 MB
_TEXT_LIMIT = 1 << 20  # bytes a compressed comment may have; Pillow's own limit too


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of each whole chunk, length and checksum included."""
    position = 8
    while position + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if position + 12 + length > len(data):
            return
        yield kind, position, position + 12 + length
        position += 12 + length
        if kind == b"IEND":
            return


def _unwrap_png(data: bytes) -> Parts:
    """A PNG of its critical chunks and tRNS; checksums of the others are noted, not fatal."""
    kept: list[bytes | memoryview] = [data[:8]]
    view, notes = memoryview(data), []
    found: dict[bytes, bytes] = {}
    end = None
    for kind, start, stop in png_chunks(data):
        good = zlib.crc32(view[start + 4 : stop - 4]) == int.from_bytes(view[stop - 4 : stop], "big")
        if not good:
            notes.append(_png_checksum(kind))
        if kind in _PNG_KEPT:
            kept.append(view[start:stop])
        elif good and kind in (b"eXIf", b"iCCP", b"acTL"):
            found[kind] = data[start + 8 : stop - 4]
        elif kind in (b"zTXt", b"iTXt") and _expands(data[start + 8 : stop - 4]):
            notes.append(("metadata-bomb", f"a compressed comment has more than {_TEXT_LIMIT} bytes; it is ignored"))
        if kind == b"IHDR" and stop - start == 25:
            found[kind] = data[start + 8 : stop - 4]
        end = stop if kind == b"IEND" else None
    if b"IHDR" not in found or end is None:
        raise BadPicture("truncated", f"PNG ends before its last chunk, after {len(data)} bytes")
    if end < len(data):
        notes.append(("trailing-data", f"{len(data) - end} bytes follow the end of the picture"))
    profile, frames = _png_profile(found.get(b"iCCP"), notes), found.get(b"acTL", b"")
    return Parts(format="PNG", body=b"".join(kept), exif=found.get(b"eXIf"), profile=profile, bits=found[b"IHDR"][8],
                 frames=int.from_bytes(frames[:4], "big") or 1, notes=tuple(dict.fromkeys(notes)))


def _png_checksum(kind: bytes) -> Note:
    name = kind.decode("latin-1")
    if kind in _PNG_KEPT and kind != b"IDAT":
        raise BadPicture("bad-checksum", f"checksum of chunk {name} does not match")
    return "bad-checksum", f"checksum of chunk {name} does not match its data"


def _inflate(data: bytes, limit: int) -> bytes | None:
    """The inflated `data`; None when it is damaged or larger than `limit` bytes."""
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, limit)
    except zlib.error:
        return None
    return plain if stream.eof else None


def _expands(text: bytes) -> bool:
    """Does this compressed text chunk hold more than a sane comment?"""
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
        notes.append(("invalid-profile", "the embedded colour profile cannot be unpacked; taken as sRGB"))
    return profile
