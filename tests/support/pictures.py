"""Pictures and masks that tests draw, as files and as bytes."""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms

from prep.images.decode import decode_picture, read_header


def draw(path: Path, size: tuple[int, int], *, seed: int, alpha: bool = False) -> Path:
    """Writes a picture of smooth random colors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_drawn(path.suffix, tuple(size), seed, alpha))
    return path


@lru_cache(maxsize=256)  # most tests draw the same few
def _drawn(suffix: str, size: tuple[int, int], seed: int, alpha: bool) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 4 if alpha else 3), dtype=np.uint8)
    return saved(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), _kind(suffix))


def _kind(suffix: str) -> str:
    return Image.registered_extensions()[suffix.lower()]


def draw_captioned(root: Path, count: int, *, size: tuple[int, int] = (300, 300), captions: bool = True) -> None:
    """Writes 0.png, 1.png, …, each with a caption file unless `captions` is false."""
    for number in range(count):
        path = draw(root / f"{number}.png", size, seed=number)
        if captions:
            path.with_suffix(".txt").write_text(f"picture number {number}")


def draw_mask(path: Path, size: tuple[int, int]) -> Path:
    """Writes a mask: white in the left half, black in the right."""
    path.write_bytes(_drawn_mask(path.suffix, tuple(size)))
    return path


@lru_cache(maxsize=64)
def _drawn_mask(suffix: str, size: tuple[int, int]) -> bytes:
    mask = Image.new("L", size, 0)
    mask.paste(255, (0, 0, size[0] // 2, size[1]))
    return saved(mask, _kind(suffix))


def saved(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    """A file of `picture` in the format `kind`."""
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def decoded(data: bytes, alpha: str = "white") -> np.ndarray:
    """uint8 [H, W, 3]: what the file shows, of the size that its header says."""
    picture = decode_picture(data, alpha=alpha)
    assert picture.mode == "RGB"
    assert picture.size == read_header(data).size
    return np.asarray(picture)


def srgb_profile() -> bytes:
    """An ICC profile that says sRGB."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def swapped_profile() -> bytes:
    """sRGB with its red and green primaries exchanged: a profile whose conversion can be told without LittleCMS."""
    return srgb_profile().replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")
