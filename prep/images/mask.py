"""Where the mask of a picture is: its centre of mass, in exact integers."""

from __future__ import annotations

from typing import Literal

import numpy as np

from prep.arrays import Focus
from prep.buckets.views import ONE
from prep.images import decode as images
from prep.images.decode import Pixels
from prep.images.formats.sniff import BadPicture, NoDecoder


def focus_in(data: bytes, what: Literal["mask", "alpha"]) -> Focus | None:
    """The focus of a mask file, or of a picture's transparency.

    `None` for what is black everywhere, and for what cannot be decoded, which is told when its row is made. Raises
    `NoDecoder`.
    """
    try:
        return focus_of(np.asarray(images.decode_mask(data) if what == "mask" else images.alpha_of(data)))
    except NoDecoder:
        raise
    except BadPicture:
        return None


def focus_of(mask_HW: Pixels) -> Focus | None:
    """The centre of mass of a mask, uint8 [H, W], 255 trains; `None` where it is black everywhere."""
    total = int(mask_HW.sum(dtype=np.int64))
    if not total:
        return None
    along = [mask_HW.sum(axis=axis, dtype=np.int64) for axis in (0, 1)]
    x, y = (_middle(sums, total) for sums in along)
    return x, y


def _middle(sums: np.ndarray[tuple[int, ...], np.dtype[np.int64]], total: int) -> int:
    """The centre of mass of pixels in a row, from 0 to `ONE`, rounded half up; the first pixel's middle is at 1/2."""
    twice = int((sums * (2 * np.arange(len(sums)) + 1)).sum())
    return (ONE * twice + len(sums) * total) // (2 * len(sums) * total)
