"""Sizes, bytes and names as words, the same in a terminal and on a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prep.arrays import Finding

REJECTED = 30  # pictures that are told by name, each on a line


def safe(text: str) -> str:
    """`text` with everything that is not plainly printable (escape sequences, bidi marks, newlines) spelled out."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode()
                   for one in text)


def rejected_line(found: Finding) -> str:
    """What is said of a picture that is left out."""
    return f"rejected: {safe(found.path)}: {found.code}: {safe(found.detail)}"


def rejected_lines(found: Sequence[Finding]) -> list[str]:
    """The same of several, of which there may be too many to read: then how many of each code there are, too."""
    lines = [rejected_line(one) for one in found[:REJECTED]]
    if len(found) > REJECTED:
        sums = ", ".join(f"{count} {code}" for code, count in Counter(one.code for one in found).most_common())
        lines.append(f"and {len(found) - REJECTED} more; in all: {sums}; --json has each by name")
    return lines


def size_of(size: Sequence[int]) -> str:
    """512x768, width first."""
    return f"{size[0]}x{size[1]}"


def bytes_of(count: int) -> str:
    """Bytes with a unit: 1.5 MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} bytes"


def names_of(names: Sequence[str], limit: int) -> str:
    """The first `limit` names, spelled out, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(safe(name) for name in names[:limit]) + more
