"""Statistics of latents: mean, standard deviation and range of each channel, and the samples that differ from most.

C channels, h w latent cells, N samples. A sample's latent is that of its first view.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from prep.arrays import ITEM_BYTES
from prep.cache.reader import Reader
from prep.cache.records import RowRef
from prep.cache.values import Values, values_of
from prep.errors import CacheError
from prep.manifest.document import Manifest
from prep.manifest.opened import OpenedManifest
from prep.progress import Tick

MOST_BYTES = 1 << 31  # of rows that are read; of more, samples evenly spread
BATCH = 1 << 24  # bytes of rows read at once
FEWEST = 12  # samples, below which none is told from the others
NOTABLE = 3.5  # modified z-scores beyond this are outliers: Iglewicz and Hoaglin (1993), p. 12
_MAD, _MEAN_AD = 1 / 0.6745, 1.253314  # make both deviations that of a normal distribution

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentStatistics:
    """Mean and spread of the latents of a manifest's samples."""

    samples: np.ndarray[Any, Any]  # numbers of the N samples that were read, ascending
    means_NC: Floats  # of each sample's cells
    stds_NC: Floats
    mean_C: Floats  # of all cells
    std_C: Floats
    least_C: Floats
    most_C: Floats
    trained_mean_C: Floats | None  # of latents as a denoiser takes them; None: each cell of a patch has its own scale
    trained_std_C: Floats | None
    not_finite: tuple[int, ...]  # samples whose latents have NaN or infinity; not among `samples`
    unreadable: tuple[int, ...]  # samples whose rows are damaged or missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """A sample whose latent differs from most, by the statistic that differs most."""

    sample: int
    channel: int
    what: str  # "mean" or "standard deviation"
    value: float
    usual: float  # median over the samples
    score: float  # modified z-score


def latent_statistics(audit: OpenedManifest, tick: Tick, *, most_bytes: int = MOST_BYTES) -> LatentStatistics | None:
    """The statistics of as many samples as `most_bytes` of rows allow; ticks once for each sample.

    `None` without samples, and for a cache in a store, whose shards would have to be downloaded. Raises `CacheError` if
    a table is damaged; damaged rows are left out.
    """
    if not audit.cache.is_whole or not len(audit.samples):
        return None
    reader = Reader(audit.cache)
    parts: dict[int, tuple[Floats, ...]] = {}
    damaged: list[int] = []
    for numbers, rows_BChw in _batches(audit, reader, _chosen(audit, most_bytes), damaged):
        for number, sums in zip(numbers, zip(*_summed(rows_BChw), strict=True), strict=True):
            parts[number] = sums
        tick(len(numbers))
    reader.close()
    wrong = tuple(sorted(number for number, (sums, *_) in parts.items() if not np.isfinite(sums).all()))
    fine = sorted(set(parts) - set(wrong))
    if not fine:
        return None
    return _joined(audit.manifest, fine, [parts[number] for number in fine], wrong, tuple(sorted(damaged)))


def outliers(statistics: LatentStatistics) -> list[Outlier]:
    """The samples with a modified z-score beyond 3.5 in some channel's mean or deviation, the farthest first.

    M = 0.6745 (x - median) / MAD, of the means, and of the logarithms of the standard deviations, in each channel
    (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993; NIST/SEMATECH e-Handbook 1.3.5.17).
    """
    if len(statistics.samples) < FEWEST:
        return []
    logs = np.log(np.maximum(statistics.stds_NC, 1e-12))
    scores = np.stack([modified_z(statistics.means_NC), modified_z(logs)], axis=-1)  # [N, C, 2]
    flat = np.abs(scores).reshape(len(scores), -1)
    worst = flat.argmax(axis=1)
    listed = []
    for place in np.argsort(-flat.max(axis=1), kind="stable"):
        channel, of = divmod(int(worst[place]), 2)
        if flat[place, worst[place]] <= NOTABLE:
            break
        values = (statistics.means_NC, statistics.stds_NC)[of][:, channel]
        listed.append(Outlier(sample=int(statistics.samples[place]), channel=channel, value=float(values[place]),
                              what=("mean", "standard deviation")[of], usual=float(np.median(values)),
                              score=float(scores[place, channel, of])))
    return listed


def modified_z(values_NC: Floats) -> Floats:
    """The modified z-score of each value within its column. Where half of a column is equal, so that its MAD is 0, the
    mean absolute deviation takes its place; where all is equal, scores are 0."""
    away = values_NC - np.median(values_NC, axis=0)
    mad, mean = np.median(np.abs(away), axis=0) * _MAD, np.abs(away).mean(axis=0) * _MEAN_AD
    scale = np.where(mad > 0, mad, mean)
    return np.divide(away, scale, out=np.zeros_like(away), where=scale > 0)


def _chosen(audit: OpenedManifest, most_bytes: int) -> np.ndarray[Any, Any]:
    """Samples whose latents take at most `most_bytes`, evenly spread; all, if they fit."""
    shards = [shard for shard in audit.shards if shard["field"] == "latent" and "latent" in shard["shapes"]]
    size = sum(shard["rows"] * ITEM_BYTES[shard["dtypes"]["latent"]] * math.prod(shard["shapes"]["latent"])
               for shard in shards)
    count, rows = len(audit.samples), sum(shard["rows"] for shard in shards)
    fits = max(1, most_bytes * rows // max(size, 1))
    return np.unique(np.linspace(0, count - 1, min(count, fits)).round().astype(np.int64))


def _batches(audit: OpenedManifest, reader: Reader, chosen: np.ndarray[Any, Any],
             damaged: list[int]) -> Iterator[tuple[list[int], Values]]:
    """Samples and their latents [B, C, h, w], in the order of shards; those that cannot be read go to `damaged`."""
    columns, digests = audit.samples, [shard["digest"] for shard in audit.shards]
    first = columns.view_offsets[chosen]
    shards, rows = columns.views["latent_shard"][first], columns.views["latent_row"][first]
    order = np.lexsort((rows, shards))
    for shard in np.unique(shards):
        members = order[shards[order] == shard]
        try:
            spec, _ = reader.array_info(digests[shard], "latent")
        except (CacheError, IndexError):
            damaged += chosen[members].tolist()
            continue
        size = max(1, BATCH // spec.row_bytes)
        for start in range(0, len(members), size):
            some = members[start:start + size]
            refs = [RowRef(shard=digests[shard], row=int(rows[place])) for place in some]
            out = np.empty((len(refs), spec.row_bytes), np.uint8)
            fine = _read(reader, out, refs)
            damaged += chosen[some][~fine].tolist()
            yield chosen[some][fine].tolist(), values_of(spec, out[fine])


def _read(reader: Reader, out: np.ndarray[Any, np.dtype[np.uint8]], refs: list[RowRef]) -> np.ndarray[Any, Any]:
    """Which of the rows could be read into `out`."""
    try:
        reader.read_batch(out, "latent", refs)
        return np.ones(len(refs), bool)
    except CacheError:
        fine = np.zeros(len(refs), bool)
        for place, ref in enumerate(refs):
            try:
                reader.read_batch(out[place:place + 1], "latent", [ref])
                fine[place] = True
            except CacheError:
                continue
        return fine


def _summed(rows_BChw: Values) -> tuple[Floats, ...]:
    """Sum, sum of squares, least, most [B, C] and the number of cells [B], in float64."""
    cells = rows_BChw.reshape(*rows_BChw.shape[:2], -1).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        sums, squares = cells.sum(axis=2), np.einsum("bcn,bcn->bc", cells, cells)
    return sums, squares, cells.min(axis=2), cells.max(axis=2), np.full(len(cells), float(cells.shape[2]))


def _joined(manifest: Manifest, samples: list[int], parts: list[tuple[Floats, ...]], wrong: tuple[int, ...],
            damaged: tuple[int, ...]) -> LatentStatistics:
    sums, squares, least, most = (np.stack([part[number] for part in parts]) for number in range(4))
    cells = np.array([part[4] for part in parts])[:, None]
    means, stds = sums / cells, np.sqrt(np.maximum(squares / cells - (sums / cells) ** 2, 0))
    mean = sums.sum(axis=0) / cells.sum()
    std = np.sqrt(np.maximum(squares.sum(axis=0) / cells.sum() - mean ** 2, 0))
    normal = _normalization(manifest, len(mean))
    return LatentStatistics(
        samples=np.array(samples), means_NC=means, stds_NC=stds, mean_C=mean, std_C=std, least_C=least.min(axis=0),
        most_C=most.max(axis=0), not_finite=wrong, unreadable=damaged,
        trained_mean_C=None if normal is None else (mean - normal[0]) * normal[1],
        trained_std_C=None if normal is None else std * np.abs(normal[1]))


def _normalization(manifest: Manifest, channels: int) -> tuple[Floats, Floats] | None:
    """Shift and scale of each channel, as `prep.loader.latents` applies them; `None` if cells of a patch differ."""
    facts = manifest.document["latents"]
    scale = np.full(channels, float(facts["scaling_factor"]))
    if "mean" not in facts:
        return np.full(channels, float(facts["shift_factor"])), scale
    if math.isqrt(len(facts["mean"]) // channels) != 1:
        return None
    mean, std = (np.array([float(value) for value in facts[name]]) for name in ("mean", "std"))
    return mean, scale / std
