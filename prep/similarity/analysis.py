"""Analyzes a set of pictures by their embeddings, and makes findings: for information, never a reason to leave one out.

Results do not depend on the order in which pictures come: they are numbered by rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from prep.batching.split import ROLES
from prep.findings import Finding, finding
from prep.formatting import grouped, printable
from prep.similarity.captions import Captions, Misfit, misfits
from prep.similarity.clusters import Clusters, clusters, usual_count
from prep.similarity.duplicates import Resemblance, leaks, resemblances, threshold
from prep.similarity.neighbors import LIMIT, Neighbors, Tick, neighbors
from prep.similarity.options import SimilarityOptions
from prep.similarity.outliers import closeness, outliers
from prep.similarity.rank import rank
from prep.similarity.shares import (
    Cluster,
    Picture,
    SourceSpread,
    cluster_records,
    share_findings,
    source_spreads,
)
from prep.similarity.vectors import Doubles, Halves, Integers, Vectors, vectors_of

CODES = ("semantic-duplicate", "validation-leak", "outlier", "dominant-cluster", "uniform-source", "caption-misfit",
         "neighbors-limited")  # of findings
SHOWN = 80  # characters of a caption in a finding
EXAMPLES = 11  # pictures of a cluster, beside its medoid


@dataclass(frozen=True, kw_only=True, slots=True)
class LookAlikes:
    """Pictures that show nearly the same, and the one to keep."""

    kept: str
    others: tuple[tuple[str, float], ...]  # name and cosine with the kept one, by rank


@dataclass(frozen=True, kw_only=True, slots=True)
class EachPicture:
    """What is known of each of P pictures, by rank."""

    names: tuple[str, ...]
    clusters: Integers  # [P]: a place in `Analysis.clusters`
    alike: Doubles  # [P]: cosine with the nearest other picture; NaN: it has none
    typical: Doubles  # [P]: mean cosine with its neighbors, by which outliers are known


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """What embeddings say of a set of pictures."""

    pictures: int
    mean: float  # cosine of two different pictures
    threshold: float  # cosine from which two are near-duplicates
    closeness: float  # median of the mean cosines of pictures with their neighbors
    clusters: tuple[Cluster, ...]  # the largest first
    sources: tuple[SourceSpread, ...]  # by name
    look_alikes: tuple[LookAlikes, ...]  # by the rank of the kept one
    findings: tuple[Finding, ...]  # by code and path
    each: EachPicture = field(compare=False)


def analyze(pictures: Sequence[Picture], rows: Halves, options: SimilarityOptions, *, copies: Collection[str] = (),
           captions: Captions | None = None, tick: Tick = lambda _: None) -> Analysis:
    """Analyzes `pictures` with their embeddings `rows`, [N, D] float16 of length 1; those without one are left out
    before. Each file is given once, also where a recipe has it in several resolutions.

    `copies`: names of pictures that a scan already calls copies of others, which are not named again. `captions`: those
    of the pictures, in the same space, if the model has such. `tick` is called with numbers of pictures that are
    compared with all others, nearly all of the work. Takes at most 256 MiB beside the rows.
    """
    assert len({picture.name for picture in pictures}) == len(pictures) == len(rows)
    order = sorted(range(len(pictures)), key=lambda number: rank(pictures[number].name, pictures[number].size))
    ranked, vectors = [pictures[number] for number in order], vectors_of(rows, order)
    found = clusters(vectors, options.clusters or usual_count(len(ranked)))
    near = _neighbors(vectors, options.neighbors, found, tick)
    mean = vectors.mean()
    least = threshold(mean, options.near)
    alike, leaked = _resemblances(vectors, ranked, near, found, least)
    means = closeness(near)
    far, median = outliers(means, deviations=options.deviations, gap=options.gap)
    records, spreads = cluster_records(ranked, found, EXAMPLES), source_spreads(ranked, found)
    findings = [*_limit_findings(len(ranked), len(found)), *_resemblance_findings(ranked, alike, leaked, copies),
                *_outlier_findings(ranked, near, far, median), *share_findings(records, spreads, options.dominance)]
    if captions is not None:
        own = replace(captions, of=[captions.of[number] for number in order])
        findings += _caption_findings(ranked, own, *misfits(vectors, own, options.misfit))
    nearest = near.cosines[:, 0] if near.cosines.shape[1] else np.full(len(ranked), np.nan)
    each = EachPicture(names=tuple(picture.name for picture in ranked), clusters=found.labels, typical=means,
                       alike=np.where(np.isfinite(nearest), nearest, np.nan))
    return Analysis(each=each, pictures=len(ranked), mean=mean, threshold=least, closeness=median, clusters=records,
                    sources=spreads, look_alikes=_look_alikes(ranked, alike),
                    findings=tuple(sorted(findings, key=lambda each: (each.code, each.path))))


def _neighbors(vectors: Vectors, count: int, found: Clusters, tick: Tick) -> Neighbors:
    """The neighbors of all pictures; of more than `LIMIT`, those in the same cluster, as SemDeDup looks for them."""
    if len(vectors) <= LIMIT:
        return neighbors(vectors, count, tick=tick)
    cosines = np.full((len(vectors), count), -np.inf)
    others = np.full((len(vectors), count), -1, np.int64)
    for number in range(len(found)):
        members = np.flatnonzero(found.labels == number)
        near = neighbors(vectors, count, members, tick)
        cosines[members], others[members] = near.cosines, near.others
    return Neighbors(cosines=cosines, others=others)


def _resemblances(vectors: Vectors, pictures: Sequence[Picture], near: Neighbors, found: Clusters, least: float
                  ) -> tuple[list[Resemblance], list[Resemblance]]:
    """(near-duplicates among pictures of one role, held-out pictures that resemble those that train).

    Only pictures with a neighbor that near are looked at; beyond `LIMIT`, a cluster at a time.
    """
    close = near.cosines[:, 0] >= least if len(near.cosines) else np.zeros(0, bool)
    roles = np.array([picture.role for picture in pictures])
    groups = [close] if len(pictures) <= LIMIT else [close & (found.labels == number) for number in range(len(found))]
    alike: list[Resemblance] = []
    leaked: list[Resemblance] = []
    for group in groups:
        for role in ROLES:
            alike += resemblances(vectors, _where(group & (roles == role)), least)
        held_out = roles == "validation"
        leaked += leaks(vectors, _where(group & held_out), _where(group & ~held_out), least)
    return sorted(alike, key=lambda each: each.picture), sorted(leaked, key=lambda each: each.picture)


def _where(chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Integers:
    places: Integers = np.flatnonzero(chosen)
    return places


def _look_alikes(pictures: Sequence[Picture], alike: Sequence[Resemblance]) -> tuple[LookAlikes, ...]:
    groups: dict[int, list[tuple[str, float]]] = {}
    for each in alike:
        groups.setdefault(each.other, []).append((pictures[each.picture].name, _likeness(each.cosine)))
    return tuple(LookAlikes(kept=pictures[kept].name, others=tuple(others)) for kept, others in sorted(groups.items()))


def _resemblance_findings(pictures: Sequence[Picture], alike: Sequence[Resemblance], leaked: Sequence[Resemblance],
                          copies: Collection[str]) -> Iterator[Finding]:
    for each in alike:
        name, other, likeness = pictures[each.picture].name, pictures[each.other].name, _likeness(each.cosine)
        if name not in copies:
            yield finding(name, "semantic-duplicate", f"shows nearly the same as {other} (cosine {likeness:.3f})",
                          other=other, likeness=likeness)
    for each in leaked:
        name, other, likeness = pictures[each.picture].name, pictures[each.other].name, _likeness(each.cosine)
        yield finding(name, "validation-leak", f"held out, but shows nearly the same as {other}, which trains (cosine "
                      f"{likeness:.3f})", other=other, likeness=likeness)


def _outlier_findings(pictures: Sequence[Picture], near: Neighbors, far: Integers, median: float) -> Iterator[Finding]:
    """None in a set of so few pictures that half of them are neighbors of any."""
    means, count = closeness(near), near.others.shape[1]
    for number in far.tolist() if len(pictures) > 2 * count else ():
        nearest = int(near.others[number, 0])  # -1: none, in a cluster of its own
        yield finding(pictures[number].name, "outlier", f"mean cosine {means[number]:.2f} with its {count} nearest "
                      f"pictures, the median of all is {median:.2f}"
                      + (f"; the nearest is {pictures[nearest].name}" if nearest >= 0 else ""))


def _caption_findings(pictures: Sequence[Picture], captions: Captions, found: Sequence[Misfit], usual: float | None
                      ) -> Iterator[Finding]:
    for each in found:
        text = captions.texts[each.caption]
        yield finding(pictures[each.picture].name, "caption-misfit", f"{each.nearer:.0%} of random pictures are nearer "
                      f"to its caption '{printable(text if len(text) <= SHOWN else f'{text[:SHOWN - 1]}…')}'")
    if usual is not None:
        yield finding(".", "caption-misfit", f"{usual:.0%} of random pictures are nearer to half of the captions than "
                      "their own pictures: these captions say much the same of all, or are those of other pictures")


def _limit_findings(count: int, parts: int) -> Iterator[Finding]:
    if count > LIMIT:
        yield finding(".", "neighbors-limited", f"{grouped(count)} pictures, more than {grouped(LIMIT)}: each is "
                      f"compared with those of its cluster, of {parts}; what resembles it in another one is missed")


def _likeness(cosine: float) -> float:
    return round(min(cosine, 1.0), 4)
