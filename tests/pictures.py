"""Pictures and masks that tests draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def draw(path: Path, size: tuple[int, int], *, seed: int, alpha: bool = False) -> Path:
    """Writes a picture of smooth random colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = 4 if alpha else 3
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, channels), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path)
    return path


def draw_mask(path: Path, size: tuple[int, int]) -> Path:
    """Writes a mask: white in the left half, black in the right."""
    mask = Image.new("L", size, 0)
    mask.paste(255, (0, 0, size[0] // 2, size[1]))
    mask.save(path)
    return path
