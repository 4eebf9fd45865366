"""A drawn scene and copies of it, as photos are copied: cut, resized, brightened, blurred."""

from __future__ import annotations

import io
from itertools import chain

import numpy as np
from PIL import Image, ImageFilter

from prep.scan.duplicates.identity import sampled, thumb_of
from prep.scan.duplicates.signature import likely_blocks


def scene(seed: int, size=(360, 300)) -> Image.Image:
    """Something with large and small shapes, as photos have."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    fine = Image.fromarray(rng.integers(0, 256, (60, 60, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return Image.blend(small, fine, 0.25)


def thumb(picture: Image.Image):
    return thumb_of(sampled(picture), picture.size)


def jpeg(picture: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=60)
    return Image.open(stream).convert("RGB")


ORIGINAL = scene(0)
COPIES = {
    "same": ORIGINAL,
    "smaller": jpeg(ORIGINAL.resize((150, 125))),
    "brighter": ORIGINAL.point(lambda value: min(255, value * 0.8 + 50)),
    "blurred": ORIGINAL.filter(ImageFilter.GaussianBlur(2)),
    "right part": jpeg(ORIGINAL.crop((120, 0, 360, 300))),
    "top part": ORIGINAL.crop((0, 0, 360, 190)),
    "middle, half of it": ORIGINAL.crop((90, 0, 270, 300)),
}


def likely_pairs(*search, **options):
    """The likely pairs of all blocks, one after the other."""
    return chain.from_iterable(likely_blocks(*search, **options))
