"""Groups pictures that show nearly the same, and finds held-out pictures that resemble those that train.

SemDeDup (Abbas et al. 2023, arXiv 2303.09540) compares the pictures of a cluster in an order, and drops those whose
cosine with an earlier one exceeds 1 - ε. Here the order is by rank, and a picture is compared with those that are kept:
a chain of pictures, each a little different from the one before, does not become one group.

Thresholds of others do not carry over: DINOv2 (Oquab et al. 2023, appendix A) takes 0.6 within a set and 0.45 between
two, but for embeddings of SSCD, a model for copy detection; SemDeDup chooses ε by how much is to be left. The cosine of
any two pictures is near 0 with one model and far above with another, so the threshold lies between the set's mean
cosine and 1. That `near` is 0.9 is a choice to rather miss some; it was not measured on such models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prep.similarity.neighbors import nearest
from prep.similarity.vectors import Integers, Vectors, blocks_of

ALWAYS = 0.99  # a cosine from which two pictures are near-duplicates in any set, also in one of them alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Resemblance:
    """A picture that resembles another, by number."""

    picture: int
    other: int  # the picture to keep, or that trains
    cosine: float


def threshold(mean: float, near: float) -> float:
    """The cosine from which two pictures are near-duplicates: `near` of the way from the set's mean cosine to 1, but at
    most `ALWAYS`."""
    return min(mean + near * (1 - mean), ALWAYS)


def resemblances(vectors: Vectors, pictures: Integers, least: float) -> list[Resemblance]:
    """The pictures to drop, each with the nearest one that is kept. `pictures` are numbers in ascending order, the best
    first: each is kept unless its cosine with one that is kept before it is `least`."""
    kept = np.zeros(0, np.int64)
    found: list[Resemblance] = []
    for block in blocks_of(pictures):
        best = nearest(vectors, block, kept, 1)
        within = vectors.tile(block, block)
        new: list[int] = []  # places in the block
        for place, (cosine, other) in enumerate(zip(best.cosines[:, 0], best.others[:, 0], strict=True)):
            among = within[place, new]
            if len(new) and among.max() > cosine:
                cosine, other = among.max(), block[new[int(among.argmax())]]
            if cosine >= least:
                found.append(Resemblance(picture=int(block[place]), other=int(other), cosine=float(cosine)))
            else:
                new.append(place)
        kept = np.concatenate([kept, block[new]])
    return found


def leaks(vectors: Vectors, held_out: Integers, training: Integers, least: float) -> list[Resemblance]:
    """The held-out pictures whose cosine with one that trains is `least` or more, each with the nearest of these."""
    found = nearest(vectors, held_out, training, 1)
    return [Resemblance(picture=int(held_out[place]), other=int(found.others[place, 0]),
                        cosine=float(found.cosines[place, 0]))
            for place in np.flatnonzero(found.cosines[:, 0] >= least).tolist()]
