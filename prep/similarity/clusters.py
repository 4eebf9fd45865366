"""Divides pictures into clusters by spherical k-means, and places the clusters on a map.

The same rows have the same clusters, in whatever order: sums of float16 rows are exact in float64, centroids are
rounded to float16, so that their products are exact, too, and the first ones are chosen in an order that only the rows
decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

from prep.similarity.vectors import Doubles, Halves, Integers, Vectors, blocks_of

MOST = 64  # clusters, unless asked for: as many as a page shows in one look
SAMPLE = 1 << 14  # pictures from which centroids are made, 256 for each of 64 clusters
ROUNDS = 30  # of k-means, at most
TRIED = 48  # pictures at each step: of 40 sets of 3 to 19 clear clumps, 4 are divided wrongly; with 2 + log K, 26
GOLDEN = (sqrt(5) - 1) / 2  # its multiples, without their whole parts, are spread evenly
SAME = 1e-9  # 1 - cosine of rows that are the same, but for rounding of their lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Clusters:
    """Clusters of pictures, the largest first."""

    labels: Integers  # [N]: the cluster of each picture
    medoids: Integers  # [K]: of each cluster the picture nearest to its mean: the one most like all others of it
    places: Doubles  # [K, 2]: on a map where near clusters tend to be similar; 0 is the mean of all pictures

    def __len__(self) -> int:
        return len(self.medoids)


def usual_count(pictures: int) -> int:
    """The number of clusters unless one is asked for: the rule of thumb √(N/2) (Mardia, Kent and Bibby, Multivariate
    Analysis, 1979, 13.3), at most `MOST`."""
    return min(ceil(sqrt(pictures / 2)), MOST)


def clusters(vectors: Vectors, count: int) -> Clusters:
    """At most `count` clusters; fewer, if fewer rows differ.

    k-means makes the centroids of up to `SAMPLE` pictures; then each picture goes to the nearest.
    """
    order = vectors.by_content()
    labels = np.zeros(len(vectors), np.int64)
    if not len(vectors):
        return Clusters(labels=labels, medoids=labels, places=np.zeros((0, 2)))
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    centroids = _centroids(vectors, order[:SAMPLE], count)
    groups = sorted(_groups(_nearest(vectors, np.arange(len(vectors)), centroids)),
                    key=lambda group: (-len(group), int(position[group].min())))
    for number, group in enumerate(groups):
        labels[group] = number
    means = _means(vectors, groups)
    return Clusters(labels=labels, places=_places(means.astype(np.float64), [len(group) for group in groups]),
                    medoids=np.array([_medoid(vectors, *pair) for pair in zip(groups, means, strict=True)], np.int64))


def _centroids(vectors: Vectors, sample: Integers, count: int) -> Halves:
    """[K, D]: those of k-means on the sample."""
    centroids = vectors.of(sample[_seeds(vectors, sample, count)])
    before = np.zeros(0, np.int64)
    for _ in range(ROUNDS):
        labels = _nearest(vectors, sample, centroids)
        if np.array_equal(labels, before):
            break
        before, centroids = labels, _means(vectors, (sample[group] for group in _groups(labels)))
    return centroids


def _seeds(vectors: Vectors, sample: Integers, count: int) -> list[int]:
    """Places in the sample: greedy k-means++ (Arthur and Vassilvitskii 2007), the best of `TRIED` at each step, with
    1 - cosine, half of the squared distance of rows of length 1. The sample's order is random, and so are its first
    picture and even steps through it."""
    seeds, far = [0], _far(vectors, sample, np.zeros(1, np.int64))[0]
    steps = np.arange(TRIED)
    while len(seeds) < count and far.max() > SAME:
        sums = np.cumsum(far)
        tried = np.searchsorted(sums, sums[-1] * ((len(seeds) * len(steps) + steps) * GOLDEN % 1), "right")
        nearer = np.minimum(far, _far(vectors, sample, tried))
        best = int(nearer.sum(axis=1).argmin())
        seeds.append(int(tried[best]))
        far = nearer[best]
    return seeds


def _far(vectors: Vectors, sample: Integers, places: Integers) -> Doubles:
    """[P, S]: 1 - cosine of each picture of the sample with those at some places; 0 of the same."""
    far = 1 - np.concatenate([vectors.tile(sample[places], part) for part in blocks_of(sample)], axis=1)
    far[far <= SAME] = 0
    return far


def _nearest(vectors: Vectors, pictures: Integers, centroids: Halves) -> Integers:
    """The nearest centroid of each picture, the lowest number of several."""
    columns = centroids.astype(np.float64).T
    lengths = np.sqrt(np.square(columns).sum(axis=0))
    labels = np.zeros(len(pictures), np.int64)
    for places in blocks_of(np.arange(len(pictures))):
        labels[places] = (vectors.of(pictures[places]).astype(np.float64) @ columns / lengths).argmax(axis=1)
    return labels


def _groups(labels: Integers) -> list[Integers]:
    """The places of each label, without labels that have none."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _means(vectors: Vectors, groups: Iterable[Integers]) -> Halves:
    """[K, D]: the direction of the sum of each group's rows; any, if they cancel out."""
    sums = np.stack([sum((vectors.of(part).sum(axis=0, dtype=np.float64) for part in blocks_of(group)),
                         start=np.zeros(vectors.rows.shape[1])) for group in groups])
    sums[np.abs(sums).max(axis=1) < SAME, 0] = 1
    means: Halves = (sums / np.sqrt(np.square(sums).sum(axis=1, keepdims=True))).astype(np.float16)
    return means


def _medoid(vectors: Vectors, group: Integers, mean: Halves) -> int:
    """The picture of the group with the highest cosine with its mean; of several, the lowest number."""
    column = mean.astype(np.float64)
    products = np.concatenate([vectors.of(part).astype(np.float64) @ column for part in blocks_of(group)])
    return int(group[(products / vectors.lengths[group]).argmax()])


def _places(means: Doubles, sizes: Sequence[int]) -> Doubles:
    """[K, 2]: the two principal components of the clusters' means, weighted by their sizes. The sign of each makes its
    largest number positive."""
    weights = np.asarray(sizes, np.float64)[:, None]
    middle = means - (weights * means).sum(axis=0) / weights.sum()
    _, _, axes = np.linalg.svd(np.sqrt(weights) * middle, full_matrices=False)
    axes = axes[:2] * np.sign(np.take_along_axis(axes[:2], np.abs(axes[:2]).argmax(axis=1)[:, None], axis=1))
    places = np.zeros((len(means), 2))
    places[:, : len(axes)] = middle @ axes.T
    return places
