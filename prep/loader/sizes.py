"""The sizes that some denoisers are conditioned on: of a picture as it was, of its crop, and of its bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prep.loader.draws import Draw
from prep.loader.index import Index


def sizes_of(index: Index, draws: Sequence[Draw]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[B, 6] in pixels, for each draw: original height and width, top and left of the crop in the scaled picture, and
    height and width of the bucket.

    The order is that of SDXL's size conditions (Podell et al. 2023, section 2.2). For a mirrored view, left is counted
    in the mirrored picture, as training sees it.
    """
    samples, views = index.samples, index.samples.views
    sizes = np.empty((len(draws), 6), np.float32)
    for number, draw in enumerate(draws):
        width, height = index.manifest.buckets[int(samples.bucket[draw.sample])]
        left, top = int(views["crop_x"][draw.view]), int(views["crop_y"][draw.view])
        if views["flip"][draw.view]:
            left = int(views["scaled_width"][draw.view]) - width - left
        sizes[number] = (samples.height[draw.sample], samples.width[draw.sample], top, left, height, width)
    return sizes
