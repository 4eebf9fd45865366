"""Decodes pictures and masks for the pages, in worker processes: a file that crashes its decoder costs one answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prep.digest import digest_bytes
from prep.fs.blob import read_blob
from prep.geometry import Placement, Size, fits_scaled
from prep.images.decode import Pixels, decode_picture, encode_png, quiet_pillow, read_header, scale_and_crop
from prep.images.drawn_mask import drawn_hole
from prep.images.formats.parts import BadPicture
from prep.images.mask import alpha_of, decode_mask, place_mask
from prep.images.thumbnail import encode_jpeg, encode_shade, shrink, shrunk_size
from prep.masks.pixels import read_mask, scaled
from prep.scan.protocol import BlobMessage
from prep.workers.service import Service, Task


@dataclass(frozen=True, slots=True)
class PictureRequest:
    """A picture that a worker makes from a file."""

    what: str  # "small", "view"; of a mask "cells", "shade", both also "drawn …", or "paint", the whole mask
    blob: BlobMessage
    digest: str  # the file's bytes must still match it
    alpha: str = "white"  # color that transparency is flattened onto
    side: int = 0  # of "small" and "paint": pixels of the longer side
    scaled: Size = (0, 0)  # of the others, their placement
    crop: tuple[int, int] = (0, 0)
    bucket: Size = (0, 0)
    flip: bool = False
    transparency: bool = False  # whether the mask is the picture's transparency


UNDECODABLE = b"undecodable"  # instead of a picture


def make(question: PictureRequest) -> bytes:
    """A JPEG or a PNG; `UNDECODABLE` for a picture that is, b"" for such a mask, and for a file that is another one by
    now."""
    try:
        data = read_blob(question.blob.blob())
        return _made(question, data) if digest_bytes(data) == question.digest else b""
    except BadPicture:
        return UNDECODABLE if question.what in ("small", "view") else b""
    except (OSError, MemoryError):
        return b""


def _made(question: PictureRequest, data: bytes) -> bytes:
    place = Placement(scaled=question.scaled, crop=question.crop, bucket=question.bucket, flip=question.flip)
    if question.what == "small":
        return encode_jpeg(shrink(decode_picture(data, alpha=question.alpha), question.side))
    if question.what == "view":
        return encode_png(scale_and_crop(decode_picture(data, alpha=question.alpha), place))
    if question.what.startswith("drawn"):
        return _shown(question, drawn_hole(question.digest, place))
    mask = alpha_of(data) if question.transparency else decode_mask(data)
    if question.what == "paint":
        return encode_png(scaled(np.asarray(mask), shrunk_size(mask.size, question.side)))
    if not fits_scaled(mask.size, place.scaled):
        return b""
    return _shown(question, place_mask(mask, place, 1))


def _shown(question: PictureRequest, mask_HW: Pixels) -> bytes:
    return encode_shade(mask_HW) if question.what.endswith("shade") else encode_png(mask_HW)


@dataclass(frozen=True, slots=True)
class Painted:
    """A painted mask, and the size of its picture."""

    data: bytes
    size: Size


def mask_of_painted(question: Painted) -> bytes:
    """A gray PNG of the picture's size; b"" for what is no PNG, or of another shape."""
    try:
        header = read_header(question.data)
        if header.format != "PNG" or max(header.size) > max(question.size):
            return b""
        return encode_png(read_mask(question.data, question.size))
    except (MemoryError, BadPicture):
        return b""


def _paint(question: Painted) -> Iterator[bytes]:
    yield mask_of_painted(question)


def _make(question: PictureRequest) -> Iterator[bytes]:
    yield make(question)


MAKE = Task(name="make", question=PictureRequest, part=bytes, work=_make)
PAINT = Task(name="paint", question=Painted, part=bytes, work=_paint)
SERVICE = Service(module=__name__, tasks=(MAKE, PAINT), prepare=quiet_pillow)
