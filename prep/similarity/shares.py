"""Says which part of an epoch each cluster and each source takes, and which take far more than others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prep.batching.split import Role
from prep.findings import Finding, finding
from prep.formatting import counted
from prep.geometry import Size
from prep.similarity.clusters import Clusters

FEW = 8  # pictures of a source, of which nothing is said: so few lie in one cluster by chance


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture with an embedding."""

    name: str  # as findings call it; no two have the same
    size: Size
    source: str = ""  # as findings call it
    repeats: float = 1.0  # times that it is shown in an epoch
    role: Role = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Pictures that resemble one another more than they do others."""

    medoid: str  # the name of the picture most like all others of it, which is the cluster's name
    pictures: int
    share: float  # of an epoch, by repeats, without held-out pictures; 0 to 1
    sources: tuple[tuple[str, int], ...]  # and its pictures of each, the most first
    examples: tuple[str, ...]  # names of some pictures, the best-ranked first, without the medoid
    place: tuple[float, float]  # on the map


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpread:
    """How the pictures of a source are spread over clusters."""

    source: str
    pictures: int
    share: float  # of an epoch, as of a cluster
    clusters: int  # that have pictures of it
    largest: str  # the medoid of the one that has most of them
    part: float  # of its pictures that lie there


def cluster_records(pictures: Sequence[Picture], found: Clusters, examples: int) -> tuple[Cluster, ...]:
    """The clusters of pictures, which are sorted by rank, with up to so many `examples`."""
    shares = _shares(pictures)
    records = []
    for number, (medoid, place) in enumerate(zip(found.medoids.tolist(), found.places.tolist(), strict=True)):
        members = np.flatnonzero(found.labels == number).tolist()
        others = [member for member in members if member != medoid]
        records.append(Cluster(
            medoid=pictures[medoid].name, pictures=len(members), share=float(np.sort(shares[members]).sum()),
            sources=_counts([pictures[member].source for member in members]), place=(place[0], place[1]),
            examples=tuple(pictures[member].name for member in others[:examples])))
    return tuple(records)


def source_spreads(pictures: Sequence[Picture], found: Clusters) -> tuple[SourceSpread, ...]:
    """The sources of pictures, by name."""
    shares, labels = _shares(pictures), found.labels.tolist()
    members: dict[str, list[int]] = {}
    for number, picture in enumerate(pictures):
        members.setdefault(picture.source, []).append(number)
    spreads = []
    for source, own in sorted(members.items()):
        counts = np.bincount([labels[number] for number in own])
        spreads.append(SourceSpread(
            source=source, pictures=len(own), share=float(np.sort(shares[own]).sum()), clusters=int((counts > 0).sum()),
            largest=pictures[int(found.medoids[counts.argmax()])].name, part=float(counts.max() / len(own))))
    return tuple(spreads)


def share_findings(clusters: Sequence[Cluster], sources: Sequence[SourceSpread], dominance: float) -> Iterator[Finding]:
    """Findings on clusters that take `dominance` times an equal share of an epoch, and on sources in one cluster."""
    total = sum(cluster.pictures for cluster in clusters)
    for cluster in clusters:
        if cluster.share * len(clusters) >= dominance:
            yield finding(cluster.medoid, "dominant-cluster", f"pictures like it take {cluster.share:.0%} of an epoch "
                          f"and are {cluster.pictures / total:.0%} of all; an equal share of {len(clusters)} clusters "
                          f"is {1 / len(clusters):.0%}")
    for spread in sources if len(sources) > 1 and len(clusters) > 1 else ():
        if spread.clusters == 1 and spread.pictures >= FEW:
            yield finding(spread.source, "uniform-source", f"its {counted(spread.pictures, 'picture')} all resemble "
                          f"{spread.largest}: {spread.share:.0%} of an epoch")


def _shares(pictures: Sequence[Picture]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[N]: the part of an epoch that each picture takes."""
    repeats = np.array([0.0 if picture.role == "validation" else picture.repeats for picture in pictures])
    return repeats / max(float(np.sort(repeats).sum()), 1e-12)


def _counts(sources: Sequence[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((source, sources.count(source)) for source in set(sources)),
                        key=lambda counted: (-counted[1], counted[0])))
