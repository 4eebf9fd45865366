"""Any color mode to 8-bit sRGB, with alpha apart. The policy is in `decode.py`."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from prep.images.formats.parts import BadPicture, Note

# Black point compensation, as photo editors use it: it keeps shadows apart under the relative colorimetric intent.
_INTENT, _FLAGS = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
_SAME = 2  # levels of 255: a profile that moves no probe color further is sRGB under some name
_SPACES = {"RGB": ("RGB",), "L": ("GRAY", "RGB"), "CMYK": ("CMYK",)}  # gray is often saved with an RGB profile
_KEY_SCALE = {2: 85, 4: 17}  # Pillow stretches small gray depths to 0-255, but not their transparent value


def split_alpha(picture: Image.Image, bits: int) -> tuple[Image.Image, Image.Image | None]:
    """(color in mode RGB, L or CMYK; alpha in mode L or None). `bits`: depth per channel as stored."""
    mode = picture.mode
    if mode in ("RGBa", "La"):
        picture, mode = picture.convert("RGBA" if mode == "RGBa" else "LA"), mode.upper()
    if mode == "RGBA":
        return picture.convert("RGB"), picture.getchannel("A")
    if mode == "LA":
        return picture.getchannel("L"), picture.getchannel("A")
    if mode in ("P", "PA"):
        if picture.has_transparency_data:
            return split_alpha(picture.convert("RGBA"), bits)
        return picture.convert("RGB"), None
    alpha = _key_alpha(picture, bits)
    if mode in ("RGB", "L", "CMYK"):
        return picture, alpha
    if mode == "1":
        return picture.convert("L"), alpha
    if mode.startswith("I") or mode == "F":
        return _to_8_bits(picture), alpha
    if mode == "YCbCr":
        return picture.convert("RGB"), None
    raise BadPicture("odd-colours", f"color mode is {mode}, expected RGB, gray, palette or CMYK")


def _key_alpha(picture: Image.Image, bits: int) -> Image.Image | None:
    """0 where the pixel has the one transparent color of a PNG (tRNS of gray or RGB); None without one."""
    key = picture.info.get("transparency")
    if key is None or isinstance(key, bytes):
        return None
    values = np.asarray(picture)
    if picture.mode == "RGB":
        wanted = np.asarray(key) >> (8 if bits == 16 else 0)  # Pillow keeps the high byte of 16-bit color
        opaque = (values != wanted).any(axis=-1)
    elif picture.mode == "1":
        opaque = values != (int(key) > 0)
    else:
        opaque = values.astype(np.int64) != int(key) * _KEY_SCALE.get(bits, 1)
    return Image.fromarray(opaque.astype(np.uint8) * 255)


def _to_8_bits(picture: Image.Image) -> Image.Image:
    """Gray of 16 or 32 bits as mode L: v·255/65535 rounded; floats from 0 to 1 times 255. Never clipped."""
    values: np.ndarray[Any, Any] = np.asarray(picture)
    low, high = values.min(), values.max()
    if picture.mode == "F":
        if not (np.isfinite(low) and np.isfinite(high) and low >= 0 and high <= 1):
            raise BadPicture("odd-colours", f"float values are from {low:g} to {high:g}, expected 0 to 1")
        return Image.fromarray(np.floor(values.astype(np.float64) * 255 + 0.5).astype(np.uint8))
    if low < 0 or high > 65535:
        raise BadPicture("odd-colours", f"gray values are from {low} to {high}, expected 0 to 65535")
    return Image.fromarray(((values.astype(np.uint32) * 2 + 257) // 514).astype(np.uint8))  # 65535 = 255·257


def to_srgb(color: Image.Image, profile: bytes | None) -> Image.Image:
    """`color` (RGB, L or CMYK) as sRGB in mode RGB; an unusable or needless profile is ignored."""
    if profile is None or judge(profile, color.mode) != _OTHER:
        return color if color.mode == "RGB" else color.convert("RGB")
    return _convert(color, profile)


_OTHER: tuple[Note, ...] = (("non-srgb-profile", "the embedded color profile is not sRGB; colors are converted"),)
_INVALID: tuple[Note, ...] = (("invalid-profile", "the embedded color profile is unusable; taken as sRGB"),)


@lru_cache(maxsize=64)
def judge(profile: bytes, mode: str) -> tuple[Note, ...]:
    """Notes on a profile for a picture of `mode` (RGB, L, CMYK); none if it is sRGB in effect."""
    try:
        space = _space(profile)
        if space not in _SPACES.get(mode, ()):
            return (("invalid-profile", f"the color profile is for {space}, the picture is {mode}; taken as sRGB"),)
        probe = _probe(mode)
        shift = np.asarray(_convert(probe, profile)).astype(int) - np.asarray(probe.convert("RGB"))
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return _INVALID
    return () if mode != "CMYK" and np.abs(shift).max() <= _SAME else _OTHER


def _space(profile: bytes) -> str:
    return str(ImageCms.ImageCmsProfile(io.BytesIO(profile)).profile.xcolor_space).strip()


def _probe(mode: str) -> Image.Image:
    """A picture of colors across the RGB cube: 17 steps per channel."""
    steps = np.linspace(0, 255, 17).round().astype(np.uint8)
    if mode == "L":
        return Image.fromarray(steps[None])
    grid = np.stack(np.meshgrid(*[steps] * len(mode), indexing="ij"), axis=-1)
    return Image.frombytes(mode, (grid.size // 17 // len(mode), 17), grid.tobytes())


def _convert(color: Image.Image, profile: bytes) -> Image.Image:
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if color.mode == "L" and _space(profile) == "RGB":
        color = color.convert("RGB")
    transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), color.mode, "RGB",
                                        renderingIntent=_INTENT, flags=_FLAGS)
    converted = ImageCms.applyTransform(color, transform)
    assert converted is not None  # None only when working in place
    return converted
