"""The demo's pictures: one colored shape on a textured, muted ground, with the shape's mask.

Everything is drawn from a seed: the same arguments give the same pixels. H W are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Point = tuple[float, float]

RGB = {
    "red": (214, 38, 38),
    "orange": (243, 140, 24),
    "yellow": (246, 220, 40),
    "green": (46, 160, 60),
    "blue": (40, 84, 214),
    "purple": (138, 48, 176),
    "white": (250, 250, 250),
}
MUTED = ((112, 116, 122), (132, 122, 108), (104, 122, 118), (126, 112, 124), (92, 104, 124), (140, 134, 116))
_FINER = 4  # shapes are drawn at four times the size and averaged down, for smooth edges


def draw_picture(
    *, shape: str, color: str, ground: str, size: tuple[int, int], seed: int, alike: bool = False
) -> tuple[Image.Image, Image.Image]:
    """An RGB picture of `size` (width, height) and its mask (L, 255 inside the shape).

    With `alike`, pictures that differ in color alone have all else in common: place, turn, ground.
    """
    words = f"{shape} {ground}" if alike else f"{shape} {color} {ground}"
    rng = np.random.default_rng((seed, *(ord(letter) for letter in words), *size))
    ground_HW3 = _ground(ground, size, rng)
    mask = _mask(shape, size, rng)
    alpha_HW1 = np.asarray(mask, np.float32)[..., None] / 255
    paint = np.asarray(RGB[color], np.float32) + rng.uniform(-10, 10, 3).astype(np.float32)
    picture_HW3 = ground_HW3 * (1 - alpha_HW1) + paint * alpha_HW1
    return Image.fromarray(np.clip(picture_HW3 + 0.5, 0, 255).astype(np.uint8)), mask


def _ground(kind: str, size: tuple[int, int], rng: np.random.Generator) -> NDArray[np.float32]:
    """The ground's pixels [H, W, 3]: one muted color, made lighter and darker by a pattern in -1..1."""
    width, height = size
    base = np.asarray(MUTED[rng.integers(len(MUTED))], np.float32)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    angle = rng.uniform(0, math.pi)
    along = x * math.cos(angle) + y * math.sin(angle)
    if kind == "striped":
        pattern = np.tanh(3 * np.sin(along * 2 * math.pi / rng.uniform(18, 24)))
    elif kind == "checked":
        cell = rng.uniform(12, 16)
        left, top = rng.uniform(0, 2 * cell, 2)
        pattern = np.tanh(12 * np.sin((x + left) * math.pi / cell) * np.sin((y + top) * math.pi / cell))
    elif kind == "cloudy":
        coarse = Image.fromarray(rng.uniform(-1.6, 1.6, (height // 14 + 2, width // 14 + 2)).astype(np.float32))
        pattern = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
    else:
        pattern = 2 * (along - along.min()) / (along.max() - along.min()) - 1
    swing = 44 if kind == "shaded" else 24
    return base + swing * np.asarray(pattern, np.float32)[..., None]


def _mask(shape: str, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """The shape at a random place, size and slight turn, as an antialiased mask."""
    width, height = size
    radius = rng.uniform(0.30, 0.40) * min(size)
    room_x, room_y = width / 2 - radius, height / 2 - radius
    centre = (width / 2 + rng.uniform(-0.8, 0.8) * room_x, height / 2 + rng.uniform(-0.8, 0.8) * room_y)
    outline = _outline(shape, turn=rng.uniform(-0.2, 0.2))
    large = Image.new("L", (width * _FINER, height * _FINER))
    pen = ImageDraw.Draw(large)
    pen.polygon(_place(outline, centre, radius), fill=255)
    if shape == "ring":
        pen.polygon(_place(outline, centre, radius * 0.52), fill=0)
    return large.resize(size, Image.Resampling.BOX)


def _place(points: Sequence[Point], centre: Point, radius: float) -> list[Point]:
    return [((centre[0] + x * radius) * _FINER, (centre[1] + y * radius) * _FINER) for x, y in points]


def _outline(shape: str, *, turn: float) -> list[Point]:
    """The corners of `shape` about (0, 0) within a radius of 1, turned by `turn` radians."""
    if shape in ("circle", "ring"):
        return _polygon(64)
    if shape == "cross":
        points = [(-0.34, -1), (0.34, -1), (0.34, -0.34), (1, -0.34), (1, 0.34), (0.34, 0.34),
                  (0.34, 1), (-0.34, 1), (-0.34, 0.34), (-1, 0.34), (-1, -0.34), (-0.34, -0.34)]  # fmt: skip
    elif shape == "heart":
        points = [_heart(2 * math.pi * step / 64) for step in range(64)]
    elif shape == "star":
        points = _polygon(10, inner=0.42)
    else:
        points = _polygon({"triangle": 3, "square": 4}[shape], start=math.pi / 4 if shape == "square" else 0.0)
        points = [(1.1 * x, 1.1 * y) for x, y in points]
    cos, sin = math.cos(turn), math.sin(turn)
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in points]


def _polygon(corners: int, *, start: float = 0.0, inner: float = 1.0) -> list[Point]:
    """Corners on the unit circle from the top on, every second one at `inner`."""
    angles = [start + 2 * math.pi * index / corners for index in range(corners)]
    radii = [1.0 if index % 2 == 0 else inner for index in range(corners)]
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for radius, angle in zip(radii, angles, strict=True)]


def _heart(angle: float) -> Point:
    """A point of the heart curve 16 sin³, 13 cos − 5 cos 2 − 2 cos 3 − cos 4, scaled to a radius of 1."""
    down = 13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle)
    return math.sin(angle) ** 3, -(down + 2.5) / 15


def as_file(picture: Image.Image, suffix: str) -> bytes:
    """The bytes of a .png, .jpg or .webp file of `picture`, without a time or name in them."""
    options: dict[str, dict[str, Any]] = {
        ".png": {"format": "PNG"},
        ".jpg": {"format": "JPEG", "quality": 95, "subsampling": 0},
        ".webp": {"format": "WEBP", "lossless": True},
    }
    buffer = BytesIO()
    picture.save(buffer, **options[suffix])
    return buffer.getvalue()
