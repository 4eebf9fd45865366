"""The parts of pages: records that the macros in `templates/macros.html` render."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prep.findings import SEVERITIES, Finding
from prep.pages.overlay import Shot

AROUND = 3  # pages before and after this page that are linked by number, besides the first and the last
Kind = Literal["text", "name", "number", "code", "group", "severity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    head: str
    kind: Kind = "text"  # name: a path, may break after its parts; code: unbroken; group: a link to its findings


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table; `more` rows are omitted, and `elsewhere` says where to find them."""

    caption: str  # for screen readers
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0
    elsewhere: str = ""
    links: tuple[str, ...] = ()  # of each row's name, "" for none; empty if no row has one


@dataclass(frozen=True, kw_only=True, slots=True)
class Stat:
    """A number in the head of a page."""

    value: str
    label: str
    tone: Literal["", "error", "warning", "info", "good"] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The first three lines of a page, and key numbers."""

    kind: str  # of page
    what: str  # what the data set is
    usable: str  # how much of the data set can be used
    part: float | None  # usable fraction, 0 to 1; None without pictures
    todo: str  # what to do now
    tone: Literal["error", "warning", "info", "good"]
    stats: tuple[Stat, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption:
    """A caption of a picture, possibly truncated."""

    text: str
    letters: int  # of the whole caption


Words = tuple[tuple[Literal["same", "gone", "new"], str], ...]  # of a caption, compared with another


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeCaption:
    """What a model and a person wrote about a picture."""

    by: str  # the model
    state: str  # what became of it, in words
    versions: tuple[tuple[str, tuple[str, ...]], ...]  # who wrote which captions; () if there is nothing to compare
    accept: str = ""  # address; "": there is nothing to judge
    again: str = ""  # address


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionForm:
    """The captions of a picture where they are edited. Saving sends the ids and versions that the page showed."""

    number: int  # of the sample
    sample: str  # its id
    save: str  # address
    undo: str  # address
    undoable: bool
    version: str
    trains: str  # the caption that trains now
    lines: tuple[str, ...]
    made: MadeCaption | None = None  # if a model has a part in it


@dataclass(frozen=True, kw_only=True, slots=True)
class CardReference:
    """A reference of a card's sample."""

    number: int  # from 1
    shot: Shot
    fact: str  # its size, and that of its latent


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A picture with its captions, facts and findings."""

    shot: Shot
    link: str = ""  # to the page of the sample
    tone: Literal["", "error", "warning", "info"] = ""
    facts: tuple[str, ...] = ()
    captions: tuple[Caption, ...] = ()
    more_captions: int = 0
    findings: tuple[Finding, ...] = ()
    part: float | None = None  # fraction that trains, 0 to 1
    beside: Shot | None = None  # another picture, to compare with
    references: tuple[CardReference, ...] = ()  # the first ones, in order
    words: Words = ()
    form: CaptionForm | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSide:
    """One of two pictures."""

    label: str
    shot: Shot
    link: str = ""  # to the page of the sample
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PicturePair:
    """Two pictures, side by side."""

    sides: tuple[PairSide, PairSide]
    title: str = ""  # without a finding
    finding: Finding | None = None
    likeness: str = ""
    words: Words = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """A histogram."""

    title: str
    head: str  # of the column of bins
    unit: str  # of the counts
    rows: tuple[tuple[str, int, float], ...]  # bin, count, fraction of the longest bar
    note: str = ""
    over: int | None = None  # the first bin beyond a limit


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLink:
    """A link to one of several pages."""

    number: int  # from 1
    address: str  # relative; "": this page


@dataclass(frozen=True, kw_only=True, slots=True)
class Pager:
    """Links to the other pages."""

    before: str  # address; "" for none
    after: str
    links: tuple[PageLink | None, ...]  # None: omitted pages


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The heading of a part of a page."""

    id: str
    title: str
    count: int | None = None
    note: str = ""


CUTS = (0, 1, 5, 10, 20, 40)  # percent of crop loss: upper edges of bins
FINDING_COLUMNS = (Column(head="severity", kind="severity"), Column(head="code", kind="code"),
                   Column(head="file", kind="name"), Column(head="what"))


def findings_table(findings: Sequence[Mapping[str, Any]], most: int | None = None, elsewhere: str = "",
                   link: Callable[[str], str] | None = None) -> Table:
    """A table of findings (as documents), the worst first, at most `most` rows; `elsewhere` says where the rest are,
    and `link` gives the address of the page of a picture, by its name, or "" for none."""
    ordered = sorted(findings, key=lambda finding: (
        SEVERITIES.index(finding["severity"]), finding["path"], finding["code"]))
    rows = tuple((finding["severity"], finding["code"], finding["path"], finding["detail"])
                 for finding in ordered[:most])
    return Table(caption="Findings, the worst first", columns=FINDING_COLUMNS, rows=rows,
                 more=len(findings) - len(rows), elsewhere=elsewhere,
                 links=() if link is None else tuple(link(finding["path"]) for finding in ordered[:most]))


def bars_of(title: str, head: str, unit: str, bins: Iterable[tuple[str, int]], note: str = "",
            over: int | None = None) -> Histogram:
    """A histogram from bins and their counts; `over` is the first bin beyond a limit."""
    known = list(bins)
    most = max((count for _, count in known), default=0) or 1
    return Histogram(title=title, head=head, unit=unit, note=note, over=over,
                     rows=tuple((name, count, count / most) for name, count in known))


def pager_of(number: int, count: int, address: Callable[[int], str]) -> Pager:
    """Links from page `number` (from 0) to some of `count` pages, with their addresses."""
    def link(other: int) -> str:
        return "" if other == number or not 0 <= other < count else address(other)

    near = sorted({0, count - 1, *range(number - AROUND, number + AROUND + 1)} & set(range(count)))
    links: list[PageLink | None] = []
    for before, other in zip([-1, *near], near, strict=False):
        links += [None] * (other > before + 1)
        links.append(PageLink(number=other + 1, address=link(other)))
    return Pager(before=link(number - 1), after=link(number + 1), links=tuple(links))


def binned(values: Sequence[float], edges: Sequence[float], unit: str) -> Iterator[tuple[str, int]]:
    """Counts values up to each edge, and above the last; bins include their upper edge."""
    places = [bisect_left(edges, value) for value in values]
    for number, (low, high) in enumerate(zip([0, *edges], edges, strict=False)):
        name = f"{high:g}{unit}" if high == 0 else f"{low:g}–{high:g}{unit}"
        yield name, places.count(number)
    yield f"above {edges[-1]:g}{unit}", places.count(len(edges))


def plural(count: int, noun: str, nouns: str = "") -> str:
    """A count with its noun: 1 picture, 2,000 pictures."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
