"""Computes masks: maps of pictures, thresholded and combined. All are uint8 [H, W]; 255 trains.

Pillow blurs and scales.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from PIL import Image, ImageFilter

from prep.geometry import Size, fits
from prep.images.decode import Pixels, decode_picture
from prep.images.formats.parts import BadPicture
from prep.images.mask import alpha_of, decode_mask
from prep.masks.methods import Combine, MaskOptions
from prep.parse import color_of


def alpha_map(data: bytes) -> Pixels:
    """The picture's opacity. Raises `BadPicture`."""
    return np.asarray(alpha_of(data))


def color_map(data: bytes, *, color: str, tolerance: int) -> Pixels:
    """0 where every channel is within `tolerance` of `color`, else 255. Raises `BadPicture`."""
    pixels_HW3 = np.asarray(decode_picture(data, alpha=color)).astype(np.int16)
    away_HW = np.abs(pixels_HW3 - np.array(color_of(color), dtype=np.int16)).max(axis=-1)
    return np.where(away_HW > tolerance, np.uint8(255), np.uint8(0))


def luma_map(data: bytes) -> Pixels:
    """Brightness: ITU-R 601-2 luma, as Pillow rounds it; transparency is flattened onto white. Raises `BadPicture`."""
    return np.asarray(decode_picture(data, alpha="white").convert("L"))


def plain_map(data: bytes, choice: MaskOptions) -> Pixels:
    """The map of a method that needs no model. Raises `BadPicture`."""
    if choice.method == "alpha":
        return alpha_map(data)
    if choice.method == "color":
        return color_map(data, color=choice.color, tolerance=choice.tolerance)
    assert choice.method == "threshold", choice.method
    return luma_map(data)


def scaled(gray: Pixels, size: Size) -> Pixels:
    """`gray` scaled to `size` (width, height) with the triangle filter."""
    if gray.shape == size[::-1]:
        return gray
    return np.asarray(Image.fromarray(gray).resize(size, Image.Resampling.BILINEAR))


def finish_map(gray: Pixels, choice: MaskOptions) -> Pixels:
    """The mask of a map: smoothed, thresholded, inverted and expanded as `choice` says."""
    if choice.smooth:
        gray = np.asarray(Image.fromarray(gray).filter(ImageFilter.GaussianBlur(choice.smooth)))
    if choice.cut is not None:
        gray = np.where(gray >= choice.cut * 255, np.uint8(255), np.uint8(0))
    if choice.invert:
        gray = 255 - gray
    return dilate(gray, choice.expand)


def dilate(gray: Pixels, pixels: int) -> Pixels:
    """The maximum over the square of side 2·|`pixels`|+1 around each pixel; for negative `pixels`, the minimum.

    One axis after the other, and each step doubles the window: 16 passes of numpy for 100 pixels.
    """
    pick = np.maximum if pixels > 0 else np.minimum
    for axis in (0, 1) if pixels else ():
        reach = 1
        steps = [reach]
        while reach < 2 * abs(pixels) + 1:
            reach = min(2 * reach, 2 * abs(pixels) + 1)
            steps.append(reach)
        wide = np.pad(gray, [(abs(pixels), abs(pixels)) if other == axis else (0, 0) for other in (0, 1)], mode="edge")
        for before, after in pairwise(steps):
            wide = _paired(wide, after - before, axis, pick)
        gray = wide
    return gray


def _paired(wide: Pixels, shift: int, axis: int, pick: Callable[[Pixels, Pixels], Pixels]) -> Pixels:
    """`pick` of each pixel and the pixel `shift` further along `axis`; the result is shorter by `shift`."""
    length = wide.shape[axis] - shift
    return pick(wide[:length], wide[shift:]) if axis == 0 else pick(wide[:, :length], wide[:, shift:])


def combined(mask: Pixels, base: Pixels | None, how: Combine) -> Pixels:
    """`mask` combined with `base`, the previous mask, of the same size.

    A picture without a mask trains everywhere, so subtracting starts from white. The other ways return `mask` as it is:
    adding to white would leave it white.
    """
    if how == "subtract":
        from_what = np.full_like(mask, 255) if base is None else base
        return np.where(from_what > mask, from_what - mask, np.uint8(0))
    if base is None or how == "replace":
        return mask
    return np.maximum(mask, base) if how == "add" else np.minimum(mask, base)


def read_mask(data: bytes, size: Size | None) -> Pixels:
    """The mask in a file, scaled to `size` if given. Raises `BadPicture`, also for a mask of another shape."""
    mask = decode_mask(data)
    if size is None:
        return np.asarray(mask)
    if not fits(mask.size, size):
        raise BadPicture("mask-size-mismatch", f"mask has {mask.size[0]}x{mask.size[1]} pixels, "
                                "not its picture's shape")
    return scaled(np.asarray(mask), size)
