"""Names the pictures of several sources in findings by their directory, with as many above it as tell them apart."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from prep.formatting import printable_name
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket

_GLOB = re.compile(r"[*?\[{]")
_NUMBERED = re.compile(r"source\[(\d{1,9})\]/(.+)", re.DOTALL)  # as manifests had it before


def source_prefixes(places: Sequence[Place | None]) -> tuple[str, ...]:
    """What the names of each source's pictures begin with: `10_sks dog/`; nothing for a single source.

    The names of pictures in tars have the tar already. A source at the place of another one gets a number behind its
    name, and one whose place is not known has its number alone.
    """
    if len(places) < 2:
        return ("",) * len(places)
    parts = [None if place is None else _parts(place) for place in places]
    different, depth = {path for path in parts if path is not None}, 1
    while len({path[-depth:] for path in different}) < len(different) and depth < max(map(len, different)):
        depth += 1
    named: list[tuple[str, str]] = []  # prefix, and the name of tars: "" of a directory
    for number, path in enumerate(parts):
        first, tars = (f"source[{number}]/", "") if path is None else _prefix(path[-depth:])
        prefix, copy = first, 2
        while any(other == prefix and _may_share(tars, others) for other, others in named):
            prefix, copy = f"{first.rstrip('/')} ({copy})/".lstrip(), copy + 1
        named.append((prefix, tars))
    return tuple(prefix for prefix, _ in named)


def sources_of(label: str, prefixes: Sequence[str]) -> list[tuple[int, str]]:
    """(source, name) of each picture that a label of findings may mean, also one as manifests had it before."""
    pictures = [(number, label.removeprefix(prefix)) for number, prefix in enumerate(prefixes)
                if prefix and label.startswith(prefix)]
    if numbered := _NUMBERED.fullmatch(label):
        pictures.append((int(numbered[1]), numbered[2]))
    return pictures


def labels_of(source: int, name: str, prefixes: Sequence[str]) -> list[str]:
    """The labels that findings on a picture may have."""
    return [f"{prefixes[source]}{name}" if source < len(prefixes) else name, f"source[{source}]/{name}"]


def _parts(place: Place) -> tuple[str, ...]:
    return place.parts if isinstance(place, Bucket) else Path(os.path.abspath(place)).parts  # noqa: PTH100  # as named: links stay


def _prefix(tail: tuple[str, ...]) -> tuple[str, str]:
    tars = tail[-1] if tail[-1].endswith(".tar") else ""
    above = tail[:-1] if tars else tail
    if globs := [number for number, part in enumerate(above) if tars and _GLOB.search(part)]:
        above = above[:globs[0]]
    names = [part for part in above if part.strip("/\\")]
    return printable_name("".join(f"{part}/" for part in names)), tars


def _may_share(tars: str, others: str) -> bool:
    """Whether two sources with one prefix may have pictures of one name: not two tars that are called otherwise."""
    return not tars or not others or tars == others or bool(_GLOB.search(tars) or _GLOB.search(others))
