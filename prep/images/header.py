"""Reads a picture's header, and picks the object that will decode it."""

from __future__ import annotations

import io
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from PIL import Image, ImageFile
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from prep.formatting import grouped
from prep.geometry import Size
from prep.images.color import judge
from prep.images.formats.exif import checked_orientation, orientation_of
from prep.images.formats.isobmff import boxes
from prep.images.formats.jpeg import pad_scans
from prep.images.formats.parts import BadPicture, Note, PictureParts
from prep.images.formats.png import check_complete
from prep.images.formats.sniff import unwrap
from prep.images.plugins import Extra, HeicFile, JxlFile

OPENERS: Mapping[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile, "PNG": PngImageFile, "WEBP": WebPImageFile, "BMP": BmpImageFile, "TIFF": TiffImageFile,
    "GIF": GifImageFile, "AVIF": AvifImageFile, "HEIC": HeicFile, "JXL": JxlFile,
}

MAX_PIXELS = 1 << 28  # 16384 x 16384: 0.8 GB as RGB

_CORNER = 4  # pixels, of 8: many pictures end in a plain gray pixel, few in a plain gray corner
_NEARLY = 4  # levels of 255: libjpeg smooths gray, as in the first scans of a progressive picture
_DEEP = {"I": 32, "F": 32, "1": 1}
_MOST_PAGES = 1 << 16  # pages to count, at most; a hostile TIFF may have a directory at every sixth byte
_ORIENTATION, _PLANES = 0x0112, 0x011C  # tags of TIFF
_PIECES = ((0x0111, 0x0117), (0x0144, 0x0145))  # places and lengths of its strips, and of its tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureHeader:
    """The facts of a picture that are known before its pixels are decoded."""
    format: str  # JPEG PNG WEBP BMP TIFF GIF AVIF HEIC JXL
    mode: str  # Pillow's, as stored: RGB L P CMYK I;16 …
    size: Size  # pixels, after EXIF orientation
    orientation: int  # 1-8; what was applied
    has_alpha: bool  # an alpha channel or a transparent color, used or not
    frames: int
    bits: int  # per channel
    cut: bool  # whether the file seems to lack its end; decoding it says whether pixels are missing
    notes: tuple[Note, ...]  # (code, detail) on container, EXIF and profile: usable, but the user should know


def open_picture(data: bytes) -> tuple[ImageFile.ImageFile, PictureParts, PictureHeader]:
    """(the picture, not yet loaded; its parts; its header). Raises `BadPicture`."""
    parts = unwrap(data)
    with as_bad_picture("unreadable", len(data)):
        picture = OPENERS[parts.format](io.BytesIO(parts.body))
        return picture, parts, _header(picture, parts)


def _header(picture: ImageFile.ImageFile, parts: PictureParts) -> PictureHeader:
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise BadPicture("too-many-pixels", f"header says {width}x{height} pixels, expected at most {MAX_PIXELS}")
    turn, notes = _orientation(picture, parts)
    if turn >= 5 and parts.format != "TIFF":  # Pillow has already swapped a TIFF's sides
        width, height = height, width
    notes += _profile_notes(picture, parts)
    stored = f"{picture.mode} {picture.tile[0].args if picture.tile else ''}"  # such as "RGB ('RGB;16L', …)"
    bits = parts.bits or _DEEP.get(picture.mode, 16 if "16" in stored else 8)
    if isinstance(picture, Extra):
        bits, notes = picture.bits, notes + picture.notes
    return PictureHeader(format=parts.format, mode=picture.mode, size=(width, height), orientation=turn,
                         has_alpha=picture.has_transparency_data, frames=parts.frames or _frames(picture, parts),
                         bits=bits, cut=_seems_cut(picture, parts), notes=parts.notes + notes)


def _seems_cut(picture: ImageFile.ImageFile, parts: PictureParts) -> bool:
    """Whether a file that has a header lacks its end. Of the other formats no header would have been read."""
    body, length = parts.body, len(parts.body)
    if parts.format == "BMP":
        return int.from_bytes(body[2:6], "little") > length
    if parts.format == "GIF":
        return not body[-64:].rstrip(b"\0").endswith(b"\0;")  # the last of a picture's blocks is empty
    try:
        if isinstance(picture, TiffImageFile):
            return any(start + count > length for starts, counts in _PIECES for start, count in zip(
                picture.tag_v2.get(starts, ()), picture.tag_v2.get(counts, ()), strict=False))
        if parts.format == "AVIF":
            deque(boxes(body, 0, length, "AVIF"), maxlen=0)
    except (BadPicture, TypeError):  # boxes that do not fit; tags that are no numbers
        return True
    return any(code == "missing-eoi" for code, _ in parts.notes)


def profile_of(picture: Image.Image, parts: PictureParts) -> bytes | None:
    """The ICC profile; that of JPEG XL is known only once the picture has been loaded."""
    return parts.profile or picture.info.get("icc_profile") or None


def load_checked(picture: ImageFile.ImageFile, parts: PictureParts, header: PictureHeader) -> PictureHeader:
    """Decodes `picture`; the returned header also has what is known only now: a profile in the compressed data."""
    known = profile_of(picture, parts)
    if isinstance(picture, TiffImageFile):
        _check_strips(picture)
    picture.load()
    _check_whole(picture, parts)
    return header if known else replace(header, notes=header.notes + _profile_notes(picture, parts))


def _check_whole(picture: ImageFile.ImageFile, parts: PictureParts) -> None:
    """Raises for a decoded PNG or JPEG whose data ended too early (see `prep.images.formats.png`)."""
    last = {picture.height - 1, picture.height - 1 - picture.height % 2}  # interlaced, the last of the odd rows
    if parts.format == "PNG" and not all(y > 0 and _row(picture, y).strip(b"\0") for y in last):
        check_complete(parts.body)
    if parts.format == "JPEG" and all(abs(value - 128) <= _NEARLY for value in _last_block(picture)):
        again = OPENERS["JPEG"](io.BytesIO(pad_scans(parts.body)))
        again.load()
        if again.tobytes() != picture.tobytes():
            raise BadPicture("truncated", "JPEG data end before the picture does; what they lack would be gray")


def _last_block(picture: ImageFile.ImageFile) -> bytes:
    """The last pixels of a JPEG: those of its last block that no neighboring block influences.

    That is a column and a row less than the block's visible part, where libjpeg blends colors; in progressive pictures,
    which it smooths, only the last pixel.
    """
    wide, high = (1 if picture.info.get("progressive") else min(_CORNER, max(1, (side - 1) % 8))
                  for side in picture.size)
    return picture.crop((picture.width - wide, picture.height - high, *picture.size)).tobytes()


def _row(picture: ImageFile.ImageFile, y: int) -> bytes:
    return picture.crop((0, y, picture.width, y + 1)).tobytes()


def _check_strips(picture: TiffImageFile) -> None:
    """Raises if the strips or tiles of a TIFF do not cover it: Pillow leaves the rest black."""
    layers = len(picture.getbands()) if picture.tag_v2.get(_PLANES) == 2 else 1
    expected = picture.width * picture.height * layers
    boxes = [tile.extents for tile in picture.tile if tile.extents is not None]
    covered = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)
    if picture.tile and picture.tile[0].codec_name != "libtiff" and covered < expected:  # libtiff checks for itself
        raise BadPicture("truncated", f"TIFF has strips for {covered} of {expected} pixels")


def _profile_notes(picture: ImageFile.ImageFile, parts: PictureParts) -> tuple[Note, ...]:
    profile = profile_of(picture, parts)
    return () if profile is None else judge(profile, _profiled_mode(picture.mode))


def _profiled_mode(mode: str) -> str:
    """The mode to which `split_alpha` reduces the picture before its color profile applies."""
    if mode == "CMYK":
        return mode
    return "L" if mode in ("1", "L", "LA", "La", "F") or mode.startswith("I") else "RGB"


def _orientation(picture: ImageFile.ImageFile, parts: PictureParts) -> tuple[int, tuple[Note, ...]]:
    if isinstance(picture, TiffImageFile):
        return checked_orientation(picture.tag_v2.get(_ORIENTATION, 1))
    return orientation_of(parts.exif or picture.info.get("exif"))


def _frames(picture: ImageFile.ImageFile, parts: PictureParts) -> int:
    """The number of frames. Never seeks in `picture`: a broken later frame would leave parts of itself behind."""
    if parts.format == "TIFF":
        return _pages(parts.body)
    try:
        counted = picture if parts.format != "GIF" else OPENERS["GIF"](io.BytesIO(parts.body))
        return max(int(getattr(counted, "n_frames", 1)), 1)
    except Exception:  # a broken later frame; only the first is needed
        return 2


def _pages(data: bytes) -> int:
    """The number of chained directories of a TIFF, in linear time; Pillow's count takes quadratic time."""
    order = "<" if data.startswith(b"II") else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    entries, entry, place = ("Q", 20, "Q") if big else ("H", 12, "I")
    seen: set[int] = set()
    try:
        at = struct.unpack_from(order + place, data, 8 if big else 4)[0]
        while at and at not in seen and len(seen) < _MOST_PAGES:
            after = at + struct.calcsize(entries) + entry * struct.unpack_from(order + entries, data, at)[0]
            seen.add(at)
            at = struct.unpack_from(order + place, data, after)[0]
    except struct.error:  # the link points outside the file
        pass
    return max(len(seen), 1)


@contextmanager
def as_bad_picture(code: str, size: int) -> Iterator[None]:
    """Turns whatever Pillow raises for a file of `size` bytes, on hostile ones anything, into a `BadPicture`."""
    try:
        yield
    except (BadPicture, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise BadPicture("too-many-pixels", str(error)) from None
    except Exception as error:
        words = str(error) or type(error).__name__
        if "file is truncated" in words.lower():  # what it says besides is of Pillow's buffers
            raise BadPicture("truncated", f"ends after {grouped(size)} bytes; the rest is missing") from None
        code = "truncated" if "truncated" in words.lower() else code
        raise BadPicture(code, f"cannot be decoded: {words}") from None
