"""Lays out the page of what embeddings say of a set: a map of clusters, their pictures, findings, sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cos, hypot, pi, sin, sqrt

from prep.pages.overlay import Shot
from prep.pages.parts import Column, Head, Section, Stat, Table, findings_table, plural
from prep.similarity.analysis import Analysis
from prep.similarity.shares import Cluster

WIDTH, HEIGHT = 560, 440  # user units of the map
MARGIN = 6  # around all circles
LEAST, MOST = 13, 60  # radius of a circle, in user units: room for its number, and for others beside the largest
FILLED = 0.35  # of the map, by circles
ROUNDS = 200  # of pushing circles apart
DRAWN = 64  # clusters on the page, the largest
ROWS = 200  # of findings
TURN = pi * (3 - sqrt(5))  # the golden angle: circles of the same place part in different directions


@dataclass(frozen=True, kw_only=True, slots=True)
class Circle:
    """A cluster on the map. Its number is its place in the list of clusters."""

    number: int  # from 1
    x: float
    y: float
    radius: float  # the area grows with the number of pictures
    says: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterMap:
    """Clusters as circles: near ones tend to be similar."""

    says: str  # for those who do not see it
    circles: tuple[Circle, ...]
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterEntry:
    """A cluster in the list, with some of its pictures."""

    number: int
    name: str
    link: str  # to all of its pictures; "" for none
    facts: tuple[str, ...]
    shots: tuple[tuple[Shot, str], ...]  # and the address of each sample's page, "" for none; the medoid first


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarityPage:
    """What the template `similarity.html` shows."""

    head: Head
    map: ClusterMap
    clusters: tuple[ClusterEntry, ...]
    findings: Table
    sources: Table
    sections: dict[str, Section]


def similarity_page(found: Analysis, *, shot: Callable[[str], Shot], link: Callable[[str], str] = lambda _: "",
                    all_of: Callable[[int], str] = lambda _: "", page_of: Callable[[str], str] = lambda _: "",
                    what: str = "", elsewhere: str = "") -> SimilarityPage:
    """The page of an analysis.

    The caller gives, by a picture's name, its thumbnail and the address of what is like it, by a cluster's number, from
    0, the address of all its pictures, and by a finding's path the address of its picture. `elsewhere` says where
    findings beyond `ROWS` are.
    """
    drawn = found.clusters[:DRAWN]
    return SimilarityPage(
        head=_head(found, what), map=cluster_map(drawn),
        clusters=tuple(_entry(number, cluster, found, shot, link, all_of) for number, cluster in enumerate(drawn)),
        findings=findings_table([each.as_json() for each in found.findings], ROWS, elsewhere, page_of),
        sources=_sources(found), sections=_sections(found, len(drawn)))


def cluster_map(clusters: Sequence[Cluster]) -> ClusterMap:
    """Circles at the clusters' places, stretched to the map and pushed apart, so that each can be clicked."""
    radii = _radii([cluster.pictures for cluster in clusters])
    places = _apart([_spot(cluster, clusters) for cluster in clusters], radii)
    circles = tuple(
        Circle(number=number, x=round(x, 1), y=round(y, 1), radius=round(radius, 1),
               says=f"cluster {number}, {cluster.medoid}: {plural(cluster.pictures, 'picture')}, "
                    f"{cluster.share:.0%} of an epoch")
        for number, (cluster, (x, y), radius) in enumerate(zip(clusters, places, radii, strict=True), 1))
    return ClusterMap(says=f"{plural(len(circles), 'cluster')} as circles, the largest of "
                           f"{plural(max((cluster.pictures for cluster in clusters), default=0), 'picture')}. The list "
                           "of clusters has the same numbers.", circles=circles)


def _spot(cluster: Cluster, clusters: Sequence[Cluster]) -> tuple[float, float]:
    """The cluster's place in user units, y downwards: one scale for both, so that distances keep their meaning."""
    across, up = [each.place[0] for each in clusters], [each.place[1] for each in clusters]
    scale = min((WIDTH - 2 * MOST) / max(max(across) - min(across), 1e-9),
                (HEIGHT - 2 * MOST) / max(max(up) - min(up), 1e-9))
    middle = (max(across) + min(across)) / 2, (max(up) + min(up)) / 2
    return WIDTH / 2 + scale * (cluster.place[0] - middle[0]), HEIGHT / 2 - scale * (cluster.place[1] - middle[1])


def _radii(counts: Sequence[int]) -> list[float]:
    """Areas in proportion to counts, as large as the map allows; none smaller than `LEAST`."""
    unit = sqrt(FILLED * WIDTH * HEIGHT / (pi * max(sum(counts), 1)))
    unit = min(unit, MOST / sqrt(max(counts, default=1)))
    return [max(unit * sqrt(count), LEAST) for count in counts]


def _apart(places: Sequence[tuple[float, float]], radii: Sequence[float]) -> list[tuple[float, float]]:
    """Moves circles that overlap away from each other, inside the map."""
    spots = [list(place) for place in places]
    for _ in range(ROUNDS):
        moved = False
        for first, one in enumerate(spots):
            for second in range(first):
                other = spots[second]
                across, down = one[0] - other[0], one[1] - other[1]
                overlap = radii[first] + radii[second] + 2 - hypot(across, down)
                if overlap > 0.1:
                    angle = first * TURN
                    length = hypot(across, down)
                    way = (across / length, down / length) if length > 1e-6 else (cos(angle), sin(angle))
                    for axis in (0, 1):
                        one[axis] += way[axis] * overlap / 2
                        other[axis] -= way[axis] * overlap / 2
                    moved = True
        for spot, radius in zip(spots, radii, strict=True):
            spot[0] = min(max(spot[0], radius + MARGIN), WIDTH - radius - MARGIN)
            spot[1] = min(max(spot[1], radius + MARGIN), HEIGHT - radius - MARGIN)
        if not moved:
            break
    return [(spot[0], spot[1]) for spot in spots]


def _entry(number: int, cluster: Cluster, found: Analysis, shot: Callable[[str], Shot], link: Callable[[str], str],
           all_of: Callable[[int], str]) -> ClusterEntry:
    sources = [f"{count:,} of {source}" for source, count in cluster.sources[:3] if len(found.sources) > 1]
    return ClusterEntry(
        number=number + 1, name=cluster.medoid, link=all_of(number),
        facts=(plural(cluster.pictures, "picture"), f"{cluster.share:.0%} of an epoch", *sources),
        shots=tuple((shot(name), link(name)) for name in (cluster.medoid, *cluster.examples)))


def _sections(found: Analysis, drawn: int) -> dict[str, Section]:
    more = len(found.clusters) - drawn
    left_out = f" {plural(more, 'smaller cluster')} not shown." if more else ""
    notes = {"map": "Each circle is a cluster of pictures that resemble one another. Its area grows with their number, "
                    f"and near circles tend to be similar.{left_out}",
             "clusters": "Each is named by the picture that is most like all others of it. Shares are of what an epoch "
                         "shows, with repeats.",
             "findings": "For your information: no picture is left out because of one.", "sources": ""}
    counts = {"map": drawn, "clusters": drawn, "findings": len(found.findings), "sources": len(found.sources)}
    return {name: Section(id=name, title=name.capitalize(), count=counts[name], note=note)
            for name, note in notes.items()}


def _head(found: Analysis, what: str) -> Head:
    counts = [sum(each.code == code for each in found.findings)
              for code in ("semantic-duplicate", "validation-leak", "outlier", "caption-misfit")]
    labels = ("near-duplicates", "held-out look-alikes", "outliers", "captions that do not fit")
    return Head(
        kind="What is in the set", what=what, part=None,
        usable=f"{plural(len(found.findings), 'finding')}, for your information" if found.findings else
        "Nothing stands out", tone="info" if found.findings else "good",
        todo="Look at the findings; what is intended can stay." if found.findings else "",
        stats=(Stat(value=f"{found.pictures:,}", label="pictures"),
               Stat(value=f"{len(found.clusters):,}", label="clusters"),
               *(Stat(value=f"{count:,}", label=label, tone="info")
                 for count, label in zip(counts, labels, strict=True) if count)))


def _sources(found: Analysis) -> Table:
    return Table(
        caption="Sources, and how they spread over clusters",
        columns=(Column(head="source", kind="name"), Column(head="pictures", kind="number"),
                 Column(head="of an epoch", kind="number"), Column(head="clusters", kind="number"),
                 Column(head="largest", kind="name"), Column(head="of its pictures", kind="number")),
        rows=tuple((each.source, f"{each.pictures:,}", f"{each.share:.0%}", f"{each.clusters:,}", each.largest,
                    f"{each.part:.0%}") for each in found.sources))
