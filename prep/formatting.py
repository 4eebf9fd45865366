"""Formats sizes, counts, bytes, durations, names and URLs, the same in a terminal and on a page."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

_SPECIAL = re.compile(r"[^\w@%+=:,./-]")  # as in `shlex.quote`, except that letters of any language need no quotes
_LABEL = re.compile(r"^source\[\d+\]/")
_URL = re.compile(r"([^/]*:/+)(.*)", re.DOTALL)


def printable(text: str) -> str:
    """`text` with all nonprintable characters (escape sequences, bidi marks, newlines) escaped."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
                   for letter in text)


def format_size(size: Sequence[int]) -> str:
    """A size like 512x768, width first."""
    return f"{size[0]}x{size[1]}"


def format_bucket(shape: tuple[Sequence[int], Sequence[Sequence[int]]]) -> str:
    """The shape of a bucket, like 512x768, or 512x768+512x512 with one reference."""
    return "+".join(map(format_size, (shape[0], *shape[1])))


def bucket_name(bucket: Mapping[str, Any]) -> str:
    """The shape of a bucket as documents have it: its size, and the sizes of its references if it has any."""
    return format_bucket((bucket["size"], bucket.get("references", ())))


def format_bytes(count: int) -> str:
    """A number of bytes with a unit, like 1.5 MiB."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return counted(count, "byte")


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun: 1 row, 0 rows, 92,160 rows. `plural` is for nouns with an irregular plural."""
    return f"{grouped(count)} {noun if count == 1 else plural or noun + 's'}"


def grouped(count: int) -> str:
    """A count with thousands separators from five digits on, so that years and steps stay as they are."""
    return f"{count:,}" if abs(count) >= 10_000 else str(count)


def shell_name(name: str) -> str:
    """A file's name for a shell: quoted if necessary, as `$'…'` of bash and zsh if it is not printable.

    The prefix `source[1]/` of names in findings is not a glob pattern and needs no quotes.
    """
    if not name.isprintable():
        spelled = name.replace("\\", "\\\\").replace("'", "\\'")
        return f"$'{printable(spelled)}'"
    return shlex.quote(name) if not name or _SPECIAL.search(_LABEL.sub("", name)) else name


def clock(seconds: float) -> str:
    """A duration like 0:05:09 or 26:00:00."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def duration(seconds: float) -> str:
    """A duration that may be long: 12.0 s, 3.2 h, 41.0 days."""
    for unit, least, size in (("days", 172_800, 86_400), ("h", 5400, 3600), ("min", 120, 60)):
        if seconds >= least:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def brief_duration(seconds: float) -> str:
    """A duration in whole units, the largest one: 4 s, 3 min, 2 h, 5 d (run.js has the same)."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(max(seconds, 0))} s"


def pace(rate: float, unit: str) -> tuple[str, str]:
    """How often something comes, and the unit: 12.3, "samples per second"; below 1, how long one takes: 24, "seconds
    per sample"."""
    if rate >= 1:
        return f"{rate:,.1f}", f"{unit}s per second"
    return (f"{1 / rate:,.3g}" if rate > 1e-9 else "–"), f"seconds per {unit}"


def join_names(names: Sequence[str], limit: int | None) -> str:
    """The first `limit` names (None: all), quoted for a shell, and the number of the rest."""
    return join_texts([shell_name(name) for name in names], limit)


def join_texts(texts: Sequence[str], limit: int | None) -> str:
    """The first `limit` texts (None: all), with control characters escaped, and the number of the rest."""
    more = f" and {grouped(len(texts) - limit)} more" if limit is not None and len(texts) > limit else ""
    return ", ".join(printable(text) for text in texts[:limit]) + more


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b` or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def shards_moved(shards: int, copied: int, size: int, done: str, before: str) -> str:
    """What a copy of a cache did: how many of its shards and how many bytes were `done`; `before`: where the rest was.
    """
    if copied == shards:
        return f"{counted(shards, 'shard')} ({format_bytes(size)}) {done}"
    if not copied and not size:
        return f"nothing {done}, {counted(shards, 'shard')} {'was' if shards == 1 else 'were'} {before}"
    return f"{grouped(copied)} of {counted(shards, 'shard')} ({format_bytes(size)}) {done}, the rest was {before}"


def printable_name(name: str) -> str:
    """`name` as valid Unicode: bytes that are not UTF-8 become `\\xNN`."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


def without_secrets(url: str) -> str:
    """A URL without user, password, query and fragment; any other text as it is, up to a question mark.

    A password may have slashes. One that may have a question mark or a number sign, too, leaves nothing to show.
    """
    if not (match := _URL.fullmatch(url)):
        return url.partition("?")[0]
    beginning, rest = match.groups()
    bare = re.split("[?#]", rest, maxsplit=1)[0]
    if set("@:") & set(rest.partition("/")[0]):  # a user
        _, at, behind = bare.rpartition("@")
        bare = "" if "@" in rest[len(bare):] else behind if at else bare.partition("/")[2]
    return f"{beginning}{bare}"
