"""Settings of what embeddings say of a set of pictures."""

from __future__ import annotations

from dataclasses import dataclass

from prep.setting import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarityOptions:
    """What counts as alike, far, too much and not fitting; no row depends on it. Sources of the numbers: the functions
    that take them."""

    near: float = setting(0.9, high=1.0, help="how alike near-duplicates are: 0 is the mean cosine of two pictures of "
                                              "the set, 1 the same picture")
    neighbors: int = setting(8, low=1, high=100, help="nearest pictures whose mean cosine says whether a picture is an "
                                                      "outlier")
    deviations: float = setting(3.5, high=1000.0, help="robust standard deviations by which outliers are farther from "
                                                       "their neighbors than the median")
    gap: float = setting(0.1, high=2.0, help="cosine by which they are farther, at least")
    clusters: int = setting(0, high=1000, help="clusters that a set is divided into",
                            derived="about the square root of half of the pictures, at most 64")
    dominance: float = setting(4.0, low=1.0, high=1000.0, help="times an equal share of an epoch, from which a cluster "
                                                               "takes too much")
    misfit: float = setting(0.25, high=1.0, help="part of random pictures that are nearer to a caption than its own, "
                                                 "from which it does not fit")
