"""Computes how much of a picture its mask covers: each row is read once, and remembered by its shard's digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prep.cache.reader import Reader
from prep.cache.records import RowRef
from prep.fs.memo import Memo
from prep.manifest.samples import Sample

KIND = "coverage"  # of a shard: its rows' means as float64, little-endian; NaN: not read yet
ROWS = 64  # read at once

Means = np.ndarray[Any, np.dtype[np.float64]]


def coverage(reader: Reader, facts: Memo, samples: Iterable[Sample], refs: Mapping[str, RowRef]) -> dict[str, float]:
    """Mean of each sample's mask, 0 to 1, by sample id; samples without a mask are omitted. Raises `CacheError`.

    A shard's digest identifies its bytes, so no row is read twice.
    """
    places = {sample.id: refs[sample.views[0].mask] for sample in samples if sample.views[0].mask is not None}
    wanted: dict[str, set[int]] = {}
    for place in places.values():
        wanted.setdefault(place.shard, set()).add(place.row)
    means = {shard: _means(reader, facts, shard, sorted(rows)) for shard, rows in wanted.items()}
    return {sample: float(means[place.shard][place.row]) for sample, place in places.items()}


def _means(reader: Reader, facts: Memo, shard: str, wanted: Sequence[int]) -> Means:
    """The means of a shard's rows, at least of those wanted."""
    means = _remembered(facts, shard, wanted[-1])
    lacking = wanted if means is None else [row for row in wanted if np.isnan(means[row])]
    if means is not None and not lacking:
        return means
    spec, rows = reader.array_info(shard, "mask")
    if means is None or len(means) != rows:
        means, lacking = np.full(rows, np.nan), wanted
    for some in _chunks(lacking):
        masks = np.empty((len(some), spec.row_bytes), np.uint8)
        reader.read_batch(masks, "mask", [RowRef(shard=shard, row=row) for row in some])
        means[some] = masks.mean(axis=1) / 255
    facts.put_digest(KIND, shard, means.astype("<f8").tobytes())
    return means


def _remembered(facts: Memo, shard: str, last: int) -> Means | None:
    noted = facts.get_digest(KIND, shard)
    if noted is None or len(noted) % 8 or len(noted) <= 8 * last:
        return None
    return np.frombuffer(noted, "<f8").astype(np.float64)


def _chunks(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    return (rows[start:start + ROWS] for start in range(0, len(rows), ROWS))
