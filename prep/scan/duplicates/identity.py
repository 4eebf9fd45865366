"""Computes what identifies copies of a decoded picture: a sample of its pixels, and two small gray thumbnails.

Neither uses every pixel: every n-th pixel of every n-th row is a tenth of the work of averaging all, and changes the
score of a near-duplicate by less than 0.01 (`tests/scan/test_real.py` has the real pairs).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

from prep.digest import digest_bytes
from prep.geometry import Size
from prep.scan.duplicates.correlation import LONG, SIDE, Gray, Thumb
from prep.scan.duplicates.signature import signature_of

SAMPLE = 3 * SIDE  # pixels of the sample's shorter side


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What identifies exact copies of a picture."""

    file: str  # SHA-256 of the bytes
    sample: int  # CRC-32 of the grays of some pixels: equal for copies, hardly ever for others
    size: Size
    signature: bytes  # of `prep.scan.duplicates.signature`


def identify(data: bytes, picture: Image.Image) -> tuple[Identity, Thumb]:
    """Identity and thumbnail of `picture` (RGB, decoded from `data`)."""
    small = sampled(picture)
    thumb = thumb_of(small, picture.size)
    return Identity(file=digest_bytes(data), sample=zlib.crc32(small.tobytes()), size=picture.size,
                    signature=signature_of(thumb)), thumb


def pixel_digest(picture: Image.Image) -> str:
    """SHA-256 of the size and every pixel of `picture` (RGB)."""
    return digest_bytes(b"%dx%d " % picture.size + picture.tobytes())


def sampled(picture: Image.Image) -> Image.Image:
    """Every n-th pixel of every n-th row, in gray; n is the largest that leaves `SAMPLE` on the shorter side."""
    every = max(min(picture.size) // SAMPLE, 1)
    size = picture.width // every, picture.height // every
    return (picture if every == 1 else picture.resize(size, Image.Resampling.NEAREST)).convert("L")


def thumb_of(gray: Image.Image, size: Size) -> Thumb:
    """The thumbnail of a picture of this size, from its sample; the smaller half is made from the larger one."""
    wide, high = size
    across, down = (max(round(SIDE * wide / high), 2), SIDE), (SIDE, max(round(SIDE * high / wide), 2))
    if wide >= high:
        first = gray.resize(across, Image.Resampling.BOX)
        second = first.resize(down, Image.Resampling.BOX)
    else:
        second = gray.resize(down, Image.Resampling.BOX)
        first = second.resize(across, Image.Resampling.BOX)
    return Thumb(across=_cut(first), down=_cut(second.transpose(Image.Transpose.TRANSPOSE)))


def smaller_half(larger: Gray, length: int, *, tall: bool) -> Gray:
    """The smaller half of a thumbnail, of this length, as `thumb_of` makes it from the larger one (`down`, if `tall`).

    Exact unless the larger half was cropped, and for the same version of Pillow.
    """
    picture = Image.fromarray(np.ascontiguousarray(larger.T if tall else larger))
    small = picture.resize((length, SIDE) if tall else (SIDE, length), Image.Resampling.BOX)
    return _cut(small if tall else small.transpose(Image.Transpose.TRANSPOSE))


def _cut(gray: Image.Image) -> Gray:
    return np.ascontiguousarray(np.asarray(gray)[:, :LONG])
