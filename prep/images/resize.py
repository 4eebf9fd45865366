"""Scales pixels as vision models want them."""

from __future__ import annotations

import numpy as np
from PIL import Image

from prep.geometry import Size
from prep.images.decode import Pixels


def scaled_pixels(pixels_HW3: Pixels, scaled: Size, crop: Size | None, resample: int) -> Pixels:
    """The picture scaled with one of Pillow's filters, and the middle of it, `crop`, if that is given: uint8, RGB.

    The offset of the middle is rounded down, as transformers does.
    """
    picture = Image.fromarray(np.ascontiguousarray(pixels_HW3)).resize(scaled, Image.Resampling(resample))
    if crop is None:
        return np.asarray(picture)
    left, top = (scaled[0] - crop[0]) // 2, (scaled[1] - crop[1]) // 2
    return np.asarray(picture.crop((left, top, left + crop[0], top + crop[1])))
