"""Sizes, counts, bytes, durations and names as text, the same in a terminal and on a page."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

_SPECIAL = re.compile(r"[^\w@%+=:,./-]")  # as `shlex.quote` has it, but letters of any language need no quotes
_LABEL = re.compile(r"^source\[\d+\]/")


def printable(text: str) -> str:
    """`text` with everything that is not plainly printable (escape sequences, bidi marks, newlines) spelled out."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode()
                   for one in text)


def format_size(size: Sequence[int]) -> str:
    """512x768, width first."""
    return f"{size[0]}x{size[1]}"


def format_bytes(count: int) -> str:
    """Bytes with a unit: 1.5 MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return counted(count, "byte")


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun: 1 row, 0 rows, 92,160 rows. `plural` is for nouns that do not just take an s."""
    return f"{grouped(count)} {noun if count == 1 else plural or noun + 's'}"


def grouped(count: int) -> str:
    """A count for people: thousands are set apart from five digits on, so that years and steps stay as they are."""
    return f"{count:,}" if abs(count) >= 10_000 else str(count)


def shell_name(name: str) -> str:
    """A file's name as a shell takes it: quoted where it must be, with `$'…'` of bash and zsh where it cannot be shown.

    What findings put before a name, `source[1]/`, is no pattern of files and needs no quotes.
    """
    if not name.isprintable():
        spelled = name.replace("\\", "\\\\").replace("'", "\\'")
        return f"$'{printable(spelled)}'"
    return shlex.quote(name) if not name or _SPECIAL.search(_LABEL.sub("", name)) else name


def clock(seconds: float) -> str:
    """A duration as 0:05:09, or 26:00:00."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def join_names(names: Sequence[str], limit: int | None) -> str:
    """The first `limit` names (None: all) as a shell takes them, and how many more there are."""
    return join_texts([shell_name(name) for name in names], limit)


def join_texts(texts: Sequence[str], limit: int | None) -> str:
    """The first `limit` texts (None: all), with control characters spelled out, and how many more there are."""
    more = f" and {grouped(len(texts) - limit)} more" if limit is not None and len(texts) > limit else ""
    return ", ".join(printable(text) for text in texts[:limit]) + more


def printable_name(name: str) -> str:
    """`name` as valid Unicode: bytes that are not UTF-8 become `\\xNN`."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")
