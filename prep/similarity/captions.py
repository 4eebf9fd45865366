"""Finds captions that do not fit their pictures, by embeddings of both in one space, as SigLIP's or CLIP's.

A caption is compared with its own picture and with random others. Only their order counts, as in retrieval (Radford et
al. 2021): how near a text is to its picture differs between models, and between long and short texts. Some pictures are
nearer to any text than others (hubs: Radovanović et al., JMLR 2010), so each one's mean cosine with all captions counts
as 0.

In a set of one subject, the order of pictures is chance for captions that say the same of all. So a caption is named
only if its picture's lead over the others, in robust standard deviations of them, is also low for the set: of 60 drawn
at random around one middle, with captions that hardly tell them apart, 3 of 100 are named instead of 27. Where even the
usual caption does not tell its picture from others, that is said once, of the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prep.digest import digest_bytes
from prep.similarity.clusters import SAME
from prep.similarity.outliers import SIGMA
from prep.similarity.vectors import Doubles, Halves, Integers, Vectors, blocks_of, vectors_of

OTHERS = 1024  # random pictures that a caption is compared with
FEWEST = 20  # of them that have another caption; with fewer, an order says nothing
LOW = 2.0  # robust standard deviations below the median lead, about 2 of 100 of a normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Captions:
    """The captions of pictures, and their embeddings."""

    texts: Sequence[str]  # each once
    rows: Halves  # [C, D]: of length 1
    of: Sequence[Sequence[int]]  # of each picture, the numbers of its captions


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """A caption that does not fit its picture."""

    picture: int
    caption: int
    nearer: float  # the part of random pictures with other captions that are nearer to it


def misfits(pictures: Vectors, captions: Captions, misfit: float) -> tuple[list[Misfit], float | None]:
    """(of each picture the caption that fits it worst, if it does not fit; `None`, or the median part of random
    pictures that are nearer to a caption than its own, if that is `misfit` or more: then no caption is named)."""
    owners = np.repeat(np.arange(len(pictures)), [len(each) for each in captions.of])
    numbers = np.array([caption for each in captions.of for caption in each], np.int64)
    nearer, lead = fits(pictures, vectors_of(captions.rows), owners, numbers)
    judged = np.flatnonzero(~np.isnan(nearer))
    if not len(judged):
        return [], None
    usual = float(np.median(nearer[judged]))
    if usual >= misfit:
        return [], usual
    middle = np.median(lead[judged])
    low = middle - LOW * SIGMA * np.median(np.abs(lead[judged] - middle))
    found: dict[int, Misfit] = {}
    for place in judged[(nearer[judged] >= misfit) & (lead[judged] < low)].tolist():
        picture, part = int(owners[place]), float(nearer[place])
        if picture not in found or part > found[picture].nearer:
            found[picture] = Misfit(picture=picture, caption=int(numbers[place]), nearer=part)
    return list(found.values()), None


def fits(pictures: Vectors, captions: Vectors, owners: Integers, numbers: Integers) -> tuple[Doubles, Doubles]:
    """How each caption, by its number [P], fits the picture that owns it [P]: (the part of random pictures with other
    captions that are nearer to it; by how many of their robust standard deviations its own is nearer than their
    median). NaN for one that cannot be compared.

    Pictures with the same caption are not compared: it is theirs, too.
    """
    order, same = pictures.by_content()[:OTHERS], _numbered(captions)
    chosen = np.flatnonzero(np.isin(owners, order))
    place_of = np.zeros(len(pictures), np.int64)
    place_of[order] = np.arange(len(order))
    sampled = same[numbers[chosen]]
    by_caption = np.argsort(sampled, kind="stable")
    sampled, places = sampled[by_caption], place_of[owners[chosen]][by_caption]
    columns, lengths = pictures.of(order).astype(np.float64).T, pictures.lengths[order]
    means = _means(pictures, captions)
    nearer, lead = np.full(len(numbers), np.nan), np.full(len(numbers), np.nan)
    for part in blocks_of(np.arange(len(numbers))):
        rows = captions.of(numbers[part]).astype(np.float64)
        own = np.einsum("ij,ij->i", rows, pictures.of(owners[part]).astype(np.float64)) / pictures.lengths[owners[part]]
        own -= means[owners[part]]
        scores = rows @ columns / lengths - means[order]
        scores[_with_captions(same[numbers[part]], sampled, places)] = np.nan
        counts = (~np.isnan(scores)).sum(axis=1)
        enough = np.flatnonzero(counts >= FEWEST)
        nearer[part[enough]] = (scores[enough] > own[enough, None]).sum(axis=1) / counts[enough]
        if len(enough):
            lead[part[enough]] = _lead(own[enough], scores[enough])
    return nearer, lead


def _lead(own: Doubles, scores: Doubles) -> Doubles:
    """[P]: how far each number is above the median of its row of `scores` [P, S], in units of the row's spread."""
    middle = np.nanmedian(scores, axis=1)
    spread = SIGMA * np.nanmedian(np.abs(scores - middle[:, None]), axis=1)
    lead: Doubles = (own - middle) / np.maximum(spread, SAME)
    return lead


def _numbered(captions: Vectors) -> Integers:
    """[C]: a number for each caption; those with the same row share it."""
    every = np.arange(len(captions))
    digests = [digest_bytes(row.tobytes()) for part in blocks_of(every) for row in captions.of(part)]
    _, numbers = np.unique(digests, return_inverse=True)
    return numbers.astype(np.int64)


def _with_captions(wanted: Integers, sampled: Integers, places: Integers) -> tuple[Integers, Integers]:
    """(rows, columns): the places of sampled pictures that have a caption in `wanted`, one row for each of these.
    `sampled`, sorted, are captions of the pictures at `places`."""
    first, past = (np.searchsorted(sampled, wanted, side) for side in ("left", "right"))
    counts = past - first
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(wanted)), counts), places[np.repeat(first, counts) + within]


def _means(pictures: Vectors, captions: Vectors) -> Doubles:
    """[N]: of each picture, of length 1, the mean product with all captions. Their mean's direction is rounded to
    float16, so that products with it are exact."""
    mean = sum((captions.of(part).sum(axis=0, dtype=np.float64) for part in blocks_of(np.arange(len(captions)))),
               start=np.zeros(captions.rows.shape[1])) / max(len(captions), 1)
    length = float(np.sqrt(np.square(mean).sum()))
    direction = (mean / max(length, 1e-12)).astype(np.float16).astype(np.float64)
    products = [pictures.of(part).astype(np.float64) @ direction for part in blocks_of(np.arange(len(pictures)))]
    means: Doubles = np.concatenate([np.zeros(0), *products]) * length / pictures.lengths
    return means
