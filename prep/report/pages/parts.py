"""The parts of pages, as records that the macros of `templates/macros.html` draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prep.findings import SEVERITIES, Finding

Kind = Literal["text", "name", "number", "code", "group", "severity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    head: str
    kind: Kind = "text"  # name: a path, broken after its parts; code: in one line; group: a link to its findings


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table; `more` rows are left out, and `elsewhere` says where to find them."""

    caption: str  # what it shows, for those who do not see it
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0
    elsewhere: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stat:
    """A number of the head."""

    value: str
    label: str
    tone: Literal["", "error", "warning", "info", "good"] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The first three lines of a page, and its numbers."""

    kind: str  # of page
    what: str  # what the data set is
    usable: str  # how much of the data set can be used
    part: float | None  # usable fraction, 0 to 1; None without pictures
    todo: str  # what to do now
    tone: Literal["error", "warning", "good"]
    stats: tuple[Stat, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlay:
    """A box over a picture, in percent of it, and a shade that is stretched over the box."""

    left: float = 0.0
    top: float = 0.0
    width: float = 100.0
    height: float = 100.0
    shade: str = ""  # a data: address
    flip: bool = False  # the shade is of the mirrored box
    outlined: bool = False
    coarse: bool = False  # the shade's pixels are cells of latents


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """A picture on a page, or words in its place."""

    name: str
    address: str  # data:; "" for none
    instead: str = "no preview"
    size: tuple[int, int] | None = None  # of the picture; what overlays need
    overlays: tuple[Overlay, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption:
    """A caption of a picture, perhaps cut."""

    text: str
    letters: int  # of the whole caption


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A picture with its captions, facts and findings."""

    shot: Shot
    tone: Literal["", "error", "warning", "info"] = ""
    facts: tuple[str, ...] = ()
    captions: tuple[Caption, ...] = ()
    more_captions: int = 0
    findings: tuple[Finding, ...] = ()
    part: float | None = None  # that trains, 0 to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two pictures that resemble each other, side by side."""

    finding: Finding
    copy: Shot
    original: Shot
    relation: str  # of the copy to the original
    likeness: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """A histogram."""

    title: str
    head: str  # of the column of bins
    unit: str  # of the counts
    rows: tuple[tuple[str, int, float], ...]  # bin, how many, part of the longest bar
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One of several pages."""

    number: int  # from 1
    address: str  # relative; "": this page


@dataclass(frozen=True, kw_only=True, slots=True)
class Pager:
    """Links to the other pages."""

    before: str  # address; "" for none
    after: str
    links: tuple[Link | None, ...]  # None: pages that are left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page with a heading."""

    id: str
    title: str
    count: int | None = None
    note: str = ""


FINDING_COLUMNS = (Column(head="severity", kind="severity"), Column(head="code", kind="code"),
                   Column(head="file", kind="name"), Column(head="what"))


def findings_table(findings: Sequence[Mapping[str, Any]], most: int, elsewhere: str) -> Table:
    """A table of findings (as documents), the worst first; at most `most` rows. `elsewhere` lists the others."""
    ordered = sorted(findings, key=lambda one: (SEVERITIES.index(one["severity"]), one["path"], one["code"]))
    rows = tuple((one["severity"], one["code"], one["path"], one["detail"]) for one in ordered[:most])
    return Table(caption="Findings, the worst first", columns=FINDING_COLUMNS, rows=rows,
                 more=max(0, len(findings) - most), elsewhere=elsewhere)


def bars_of(title: str, head: str, unit: str, bins: Iterable[tuple[str, int]], note: str = "") -> Bars:
    """The histogram of bins and their counts."""
    known = list(bins)
    most = max((count for _, count in known), default=0) or 1
    return Bars(title=title, head=head, unit=unit, note=note,
                rows=tuple((name, count, count / most) for name, count in known))


def plural(count: int, one: str, many: str = "") -> str:
    """1 picture, 2,000 pictures."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
