"""Draws masks for pictures that have none: what a model that inpaints is to paint, the same on every machine.

Source: the masks that Stable Diffusion's inpainting models were trained with, after those of LaMa (arXiv:2109.07161).
All is painted of one view in four ("in 25% mask everything", say the cards of stable-diffusion-inpainting and of
stable-diffusion-xl-1.0-inpainting-0.1; `p_drop: 0.25`, v2-inpainting-inference.yaml of Stability-AI/stablediffusion).
Of the others half have strokes, half boxes, in the numbers of "512train-large", which that file names, too, and which
is in `ldm/data/inpainting/synthetic_mask.py` of pesser/stable-diffusion. They are pixels of a picture of 512x512; here
they grow with the shorter side. Strokes have round ends, as LaMa's, and are at least 16 pixels wide, not 5: some
families are given one pixel of each latent cell, and would not see thinner ones.

Of 4,000 pictures of 512x512, those that are not painted whole are painted to 40 % in the median, and four in five of
them to between 12 and 68 %. Each took 4 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from prep.digest import digest_json, digest_spelled
from prep.geometry import Placement
from prep.images.decode import Pixels
from prep.keys import DRAWN_MEANING

SIDE = 512  # of the picture that the numbers below are for
WHOLE = 4  # one view in so many is painted whole
STROKES, LENGTH, WIDTH = (1, 5), (10, 450), (16, 400)  # from, and below
BOXES, BOX, MARGIN, RADIUS = (1, 4), (75, 450), 10, (0, 60)
BAND = 256  # rows drawn at once, for little memory

_Grid = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_Inside = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
_Shape = Callable[[_Grid, _Grid], _Inside]  # whether pixels at x, y are in it


def drawn_hole(picture: str, placement: Placement, *, every: int = 1) -> Pixels:
    """What is to be painted of a view of the picture with digest `picture`, uint8 [H, W] of the bucket's pixels, or of
    every few of them: 255 there, else 0. In exact integers; each view has draws of its own."""
    width, height = placement.bucket
    draw = _draws(picture, placement)
    x_1W = np.arange(0, width, every, dtype=np.int64)[None]
    y_H1 = np.arange(0, height, every, dtype=np.int64)[:, None]
    hole_HW = np.full((y_H1.size, x_1W.size), 255, np.uint8)
    if draw(0, WHOLE) == 0:
        return hole_HW
    shapes = list((_strokes if draw(0, 2) else _boxes)(draw, width, height))
    for top in range(0, y_H1.size, BAND):
        inside = np.logical_or.reduce([shape(x_1W, y_H1[top:top + BAND]) for shape in shapes])
        hole_HW[top:top + BAND] = np.where(inside, 255, 0)
    return hole_HW


def _draws(picture: str, placement: Placement) -> Callable[[int, int], int]:
    """Draws numbers from the first and below the second: SHA-256 of the view and of how many were drawn before."""
    scaled, crop, bucket = (list(pair) for pair in (placement.scaled, placement.crop, placement.bucket))
    seed, count = digest_json({"kind": "drawn mask", "meaning": DRAWN_MEANING, "picture": picture, "scaled": scaled,
                               "crop": crop, "bucket": bucket, "flip": int(placement.flip)}), 0

    def draw(first: int, end: int) -> int:
        nonlocal count
        count += 1
        return first + int(digest_spelled(f"{seed} {count}"), 16) % max(end - first, 1)

    return draw


def _strokes(draw: Callable[[int, int], int], width: int, height: int) -> Iterator[_Shape]:
    side = min(width, height)
    for _ in range(draw(*STROKES)):
        x, y, angle = draw(0, width), draw(0, height), math.radians(draw(0, 360))
        length, wide = draw(*LENGTH) * side // SIDE, draw(*WIDTH) * side // SIDE
        # Thousandths: no whole number of degrees comes so near to half of one that libraries could round it otherwise.
        across, down = (length * round(1000 * part) // 1000 for part in (math.cos(angle), math.sin(angle)))
        yield _stroke((x, y), (across, down), max(wide // 2, 1))


def _stroke(start: tuple[int, int], along: tuple[int, int], radius: int) -> _Shape:
    """The pixels at most `radius` away from a line."""
    (left, top), (across, down) = start, along
    square = across**2 + down**2

    def shape(x_1W: _Grid, y_H1: _Grid) -> _Inside:
        x_1W, y_H1 = x_1W - left, y_H1 - top
        at = x_1W * across + y_H1 * down  # how far along the line, times its length
        aside = (x_1W * down - y_H1 * across)**2 <= radius**2 * square
        before = x_1W**2 + y_H1**2 <= radius**2
        behind = (x_1W - across)**2 + (y_H1 - down)**2 <= radius**2
        return (aside & (at >= 0) & (at <= square) & (square > 0)) | before | behind

    return shape


def _boxes(draw: Callable[[int, int], int], width: int, height: int) -> Iterator[_Shape]:
    side = min(width, height)
    margin = MARGIN * side // SIDE
    for _ in range(draw(*BOXES)):
        high, wide = (max(draw(*BOX) * side // SIDE, 1) for _ in range(2))
        left, top = draw(margin, width - margin - wide), draw(margin, height - margin - high)
        radius = draw(*RADIUS) * side // SIDE if draw(0, 2) else 0
        yield _box((left, top, left + wide - 1, top + high - 1), min(radius, (min(wide, high) - 1) // 2))


def _box(edges: tuple[int, int, int, int], radius: int) -> _Shape:
    """The pixels between two columns and two rows, all four inclusive, with round corners."""
    left, top, right, bottom = edges

    def shape(x_1W: _Grid, y_H1: _Grid) -> _Inside:
        across = np.maximum(np.maximum(left + radius - x_1W, x_1W - (right - radius)), 0)
        down = np.maximum(np.maximum(top + radius - y_H1, y_H1 - (bottom - radius)), 0)
        inside: _Inside = across**2 + down**2 <= radius**2
        return inside

    return shape
