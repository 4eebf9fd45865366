"""Query strings of the list's addresses, to queries and back; anything unknown is an error that names what is expected.

    ?q=red+heart&split=train&source=0&bucket=512x768&finding=blank&mask=yes&from=10&to=90&page=2
    ?tag=red+heart&made=look
    ?sort=loss&order=down&loss=1.5
    ?cluster=3&sort=alike
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlencode

from prep.batching.split import ROLES
from prep.findings import CODES
from prep.formatting import format_bucket
from prep.geometry import BucketShape
from prep.manifest.select import MADE, SORTS, Query
from prep.parse import Unparsed, brief, one_of

NAMES = ("q", "tag", "made", "split", "source", "bucket", "finding", "mask", "from", "to", "loss", "cluster",
         "sort", "order")
LONGEST = 500  # characters of a search
_NUMBER = re.compile(r"[0-9]{1,9}")
_PERCENT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3})?")
_RATIO = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")


def query_of(parameters: Iterable[tuple[str, str]], buckets: Sequence[BucketShape], sources: int) -> Query:
    """The query of (name, value) pairs; empty values and `page` say nothing. Raises `Unparsed`."""
    values: dict[str, str] = {}
    for name, value in parameters:
        if name == "page":
            continue
        one_of(name, NAMES, "a name in the address")
        if value and values.setdefault(name, value) != value:
            raise Unparsed(f"{name} is given twice, expected once")
    for name in ("q", "tag"):
        if len(values.get(name, "")) > LONGEST:
            raise Unparsed(f"{name} has {len(values[name])} characters, expected at most {LONGEST}")
    low, high = (None if name not in values else _percent(values[name], name) for name in ("from", "to"))
    return Query(
        text=values.get("q", ""), tag=values.get("tag", "").strip(), made=_word(values, "made", ("model", *MADE)),
        role=_word(values, "split", ROLES), finding=_word(values, "finding", CODES),
        source=_source(values["source"], sources) if "source" in values else None,
        bucket=_bucket(values["bucket"], buckets) if "bucket" in values else None,
        masked={"": None, "yes": True, "no": False}[_word(values, "mask", ("yes", "no"))], low=low, high=high,
        hard=_ratio(values["loss"]) if "loss" in values else None,
        cluster=_cluster(values["cluster"]) if "cluster" in values else None,
        sort=_word(values, "sort", SORTS) or SORTS[0],
        descending=_word(values, "order", ("up", "down")) == "down")


def address(query: Query, buckets: Sequence[BucketShape], *, page: int = 1) -> str:
    """The query string of a query, with its `?`; "" for all samples by name. `query_of` reads it back."""
    values: dict[str, str | int | None] = {
        "q": query.text, "tag": query.tag, "made": query.made, "split": query.role, "source": query.source,
        "bucket": None if query.bucket is None else format_bucket(buckets[query.bucket]), "finding": query.finding,
        "mask": {None: "", True: "yes", False: "no"}[query.masked], "from": _spelled(query.low),
        "to": _spelled(query.high), "loss": "" if query.hard is None else f"{query.hard:.3f}".rstrip("0").rstrip("."),
        "cluster": None if query.cluster is None else query.cluster + 1,
        "sort": query.sort if query.sort != SORTS[0] else "",
        "order": "down" if query.descending else "", "page": page if page > 1 else ""}
    parameters = {name: value for name, value in values.items() if value not in ("", None)}
    return f"?{urlencode(parameters)}" if parameters else ""


def number_of(text: str, name: str, most: int) -> int:
    """A whole number from 0 to `most`. Raises `Unparsed`."""
    if not _NUMBER.fullmatch(text) or int(text) > most:
        raise Unparsed(f"{name} is {brief(text)}, expected a whole number from 0 to {most}")
    return int(text)


def _word(values: Mapping[str, str], name: str, words: Iterable[str]) -> str:
    return one_of(values[name], words, name) if name in values else ""


def _source(text: str, sources: int) -> int:
    return number_of(text, "source", sources - 1)


def _cluster(text: str) -> int:
    """The place of a cluster; pages count them from 1."""
    number = number_of(text, "cluster", 10**6)
    if not number:
        raise Unparsed("cluster is 0, expected the number of one, from 1")
    return number - 1


def _bucket(text: str, buckets: Sequence[BucketShape]) -> int:
    names = [format_bucket(shape) for shape in buckets]
    return names.index(one_of(text, names, "bucket"))


def _percent(text: str, name: str) -> float:
    if not _PERCENT.fullmatch(text) or float(text) > 100:
        raise Unparsed(f"{name} is {brief(text)}, expected percent from 0 to 100")
    return float(text) / 100


def _ratio(text: str) -> float:
    if not _RATIO.fullmatch(text):
        raise Unparsed(f"loss is {brief(text)}, expected a number, 1 for the usual loss")
    return float(text)


def _spelled(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.3f}".rstrip("0").rstrip(".")
