"""Unwraps a picture file before any decoder sees it: format, the parts to decode, EXIF, faults of the container.

`unwrap(data)` returns `PictureParts`. For JPEG and PNG, `body` is rebuilt from what decides the pixels: EXIF, comments,
thumbnails and animation frames are left out, so that no decoder can trip over them, expand them or warn about them. A
fault that leaves the picture usable is a note (code, detail); any other raises `BadPicture`. Linear in the file's size;
allocates no pixels.
"""

from __future__ import annotations

import re

from prep.images.formats.jpeg import unwrap_jpeg
from prep.images.formats.parts import BadPicture, PictureParts
from prep.images.formats.png import unwrap_png

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

# Other files that people keep under a picture's name; recognized only to name them in messages.
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
    """The format of `data` by its first bytes. Raises `BadPicture`, naming what it is instead if that is known."""
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


def unwrap(data: bytes) -> PictureParts:
    """The parts of a picture file. Raises `BadPicture` if it is not a picture or its container is broken."""
    kind = sniff(data)
    if kind == "JPEG":
        return unwrap_jpeg(data)
    if kind == "PNG":
        return unwrap_png(data)
    return PictureParts(format=kind, body=data, exif=None, profile=None, frames=None, bits=None, notes=())


# ---- JPEG ------------------------------------------------------------------------------------------------------------

# ---- PNG -------------------------------------------------------------------------------------------------------------
