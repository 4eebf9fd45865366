"""Decodes and places masks, and finds their center of mass in exact integers."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from PIL import Image

from prep.geometry import ONE, Focus, Placement
from prep.images.decode import Pixels, crop, load_layers, resize, upright
from prep.images.formats.parts import BadPicture, NoDecoder
from prep.images.header import PictureHeader

# The least value of what is to be painted: `VaeImageProcessor.binarize` of diffusers has 1 from 0.5 on, of value / 255.
WHITE = 128
CellOfHole = Literal["first", "all"]


def focus_in(data: bytes, what: Literal["mask", "alpha"]) -> Focus | None:
    """The focus of a mask file, or of a picture's transparency.

    `None` if it is entirely black, or cannot be decoded (reported when its row is made). Raises `NoDecoder`.
    """
    try:
        return focus_of(np.asarray(decode_mask(data) if what == "mask" else alpha_of(data)))
    except NoDecoder:
        raise
    except BadPicture:
        return None


def mean_in(data: bytes, what: Literal["mask", "alpha"]) -> float | None:
    """The part of a picture that its mask file, or its transparency, lets train, 0 to 1; `None`: it cannot be decoded.

    Raises `NoDecoder`.
    """
    try:
        return float(np.asarray(decode_mask(data) if what == "mask" else alpha_of(data)).mean()) / 255
    except NoDecoder:
        raise
    except BadPicture:
        return None


def focus_of(mask_HW: Pixels) -> Focus | None:
    """The center of mass of a mask, uint8 [H, W], 255 trains; `None` if it is entirely black."""
    total = int(mask_HW.sum(dtype=np.int64))
    if not total:
        return None
    along = [mask_HW.sum(axis=axis, dtype=np.int64) for axis in (0, 1)]
    x, y = (_middle(sums, total) for sums in along)
    return x, y


def _middle(sums: np.ndarray[tuple[int, ...], np.dtype[np.int64]], total: int) -> int:
    """The center of mass of a row of pixels, from 0 to `ONE`, rounded half up; the first pixel's middle is at 1/2."""
    twice = int((sums * (2 * np.arange(len(sums)) + 1)).sum())
    return (ONE * twice + len(sums) * total) // (2 * len(sums) * total)


def alpha_of(data: bytes) -> Image.Image:
    """The transparency of a picture as mode L, upright: 0 is transparent; 255 everywhere if it has none."""
    color, transparency, _, header = load_layers(data)
    return upright(transparency or Image.new("L", color.size, 255), header)


def decode_mask(data: bytes) -> Image.Image:
    """A mask file as mode L, upright: 255 trains, 0 does not.

    Color profiles are ignored, colors become luma, transparent pixels become black. Raises `BadPicture`.
    """
    return decode_mask_layers(data)[1]


def decode_mask_layers(data: bytes) -> tuple[PictureHeader, Image.Image, bool]:
    """(header, mask, whether it has colors) from decoding once; the mask as `decode_mask` returns it."""
    color, transparency, _, header = load_layers(data)
    color = color.convert("RGB") if color.mode == "CMYK" else color
    colored = color.mode == "RGB" and len({band.tobytes() for band in color.split()}) > 1
    gray = color.convert("L")
    if transparency is not None:
        canvas = Image.new("L", gray.size, 0)
        canvas.paste(gray, mask=transparency)
        gray = canvas
    return header, upright(gray, header), colored


def place_mask(mask: Image.Image, placement: Placement, factor: int) -> Pixels:
    """The mask at latent cells, uint8 [h, w]: scaled and cropped like its picture, then the rounded mean of each cell.

    `factor` is pixels per cell. The triangle filter is antialiased like Lanczos, without its ringing.
    """
    cells_hywx = _in_cells(_placed(mask, placement), factor)
    sums_hw = cells_hywx.sum(axis=(1, 3), dtype=np.int64)
    mean_hw: Pixels = ((2 * sums_hw + factor * factor) // (2 * factor * factor)).astype(np.uint8)
    return mean_hw


def place_hole(mask: Image.Image, placement: Placement) -> Pixels:
    """What is to be painted, uint8 [H, W] of a bucket's pixels: 255 where the mask, scaled and cropped like its
    picture, is at least `WHITE`, else 0."""
    hole_HW: Pixels = np.where(_placed(mask, placement) >= WHITE, np.uint8(255), np.uint8(0))
    return hole_HW


def hole_cells(hole_HW: Pixels, factor: int, cell: CellOfHole) -> Pixels:
    """A hole at latent cells, uint8 [M, h, w]: of each cell the first pixel, as `interpolate` of torch takes the
    nearest; or all its pixels as channels, row by row, as `FluxFillPipeline.prepare_mask_latents` orders them."""
    cells_hywx = _in_cells(hole_HW, factor)
    if cell == "first":
        return np.ascontiguousarray(cells_hywx[None, :, 0, :, 0])
    high, _, wide, _ = cells_hywx.shape
    return np.ascontiguousarray(cells_hywx.transpose(1, 3, 0, 2)).reshape(factor * factor, high, wide)


def mask_picture(mask_Mhw: Pixels) -> Pixels:
    """A stored mask as a picture: uint8 [h, w] of latent cells, or [H, W] if it has all their pixels."""
    count, high, wide = mask_Mhw.shape
    side = math.isqrt(count)
    cells_yxhw = mask_Mhw.reshape(side, side, high, wide)
    return np.ascontiguousarray(cells_yxhw.transpose(2, 0, 3, 1)).reshape(high * side, wide * side)


def _placed(mask: Image.Image, placement: Placement) -> Pixels:
    return crop(resize(mask, placement.scaled, Image.Resampling.BILINEAR), placement)


def _in_cells(pixels_HW: Pixels, factor: int) -> Pixels:
    """[h, factor, w, factor]: the pixels of each latent cell."""
    high, wide = pixels_HW.shape[0] // factor, pixels_HW.shape[1] // factor
    assert pixels_HW.shape == (high * factor, wide * factor), f"{pixels_HW.shape} is not in steps of {factor}"
    return pixels_HW.reshape(high, factor, wide, factor)
