"""The sizes that some denoisers are conditioned on: of a picture as it was, of its crop, and of its bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prep.loader.draws import Draw
from prep.loader.index import Index


def sizes_of(index: Index, shots: Sequence[Draw]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[B, 6] in pixels, for each shot: original height and width, top and left of the crop in the scaled picture, and
    height and width of the bucket.

    The order is that of SDXL's size conditions (Podell et al. 2023, section 2.2). For a mirrored view, left is counted
    in the mirrored picture, as training sees it.
    """
    samples, views = index.samples, index.samples.views
    found = np.empty((len(shots), 6), np.float32)
    for number, shot in enumerate(shots):
        width, height = index.manifest.buckets[int(samples.bucket[shot.sample])]
        left, top = int(views["crop_x"][shot.view]), int(views["crop_y"][shot.view])
        if views["flip"][shot.view]:
            left = int(views["scaled_width"][shot.view]) - width - left
        found[number] = (samples.height[shot.sample], samples.width[shot.sample], top, left, height, width)
    return found
