"""Spells the masks of samples as pictures of whole pictures, for trainers that crop by themselves."""

from __future__ import annotations

import numpy as np

from prep.export.sample import Bytes, ExportSample
from prep.images.decode import encode_png
from prep.images.mask import mask_picture


def plain_view(sample: ExportSample) -> int:
    """The first view that is not mirrored, or the first."""
    return next((view for view in sample.views if not sample.placement(view).flip), sample.views[0])


def is_masked(sample: ExportSample) -> bool:
    """Whether it has a mask."""
    return int(sample.of.columns.views["mask_shard"][plain_view(sample)]) >= 0


def whole_mask(sample: ExportSample) -> bytes:
    """The mask over the whole upright picture, as a gray PNG (255 trains) and as coarse as in the cache; what was
    cropped away repeats the nearest cell. White if there is no mask. Raises `CacheError` for a damaged row."""
    view = plain_view(sample)
    width, height = sample.size
    row = sample.mask(view)
    if row is None:
        return encode_png(np.full((height, width), 255, np.uint8))
    place, cells = sample.placement(view), mask_picture(row.values())
    if place.flip:
        cells = cells[:, ::-1]
    across = _cells(width, place.scaled[0], place.crop[0], place.bucket[0], cells.shape[1])
    down = _cells(height, place.scaled[1], place.crop[1], place.bucket[1], cells.shape[0])
    return encode_png(np.ascontiguousarray(cells[down][:, across]))


def _cells(side: int, scaled: int, crop: int, bucket: int, count: int) -> Bytes:
    """For each pixel of a side, the cell of a mask that covers it, or the nearest."""
    at = (np.arange(side) + 0.5) * (scaled / side) - crop
    cells: Bytes = np.clip(np.floor(at * (count / bucket)), 0, count - 1).astype(np.int64)
    return cells
