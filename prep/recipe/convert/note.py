"""A note on a setting of another tool."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from prep.formatting import printable
from prep.parse import brief

_SECRET = re.compile(r"secret|token$|passw(or)?d|access_key|api_?key|credential", re.IGNORECASE)


def shown(key: str, value: Any) -> str:
    """A value as notes have it: truncated; "" if it is secret, has something secret inside, or is absent."""
    return "" if value is None or _SECRET.search(key) or _hides(value) else brief(value)


def _hides(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_SECRET.search(str(key)) or _hides(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_hides, value))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionNote:
    """A note on a setting of another tool that has no counterpart here, or another meaning."""

    key: str  # with its place in the file: datasets[0].subsets[1].color_aug
    value: str  # as in the file, truncated; "" if it is secret or absent
    said: str  # what happens to it here
    at: str  # the place in the recipe that it concerns; "": the whole recipe; "train.toml": that file
    several: tuple[tuple[str, str], ...] = ()  # names and values of settings that one note is on, and `said` names

    @property
    def text(self) -> str:
        """The note on one line, with control characters escaped."""
        said = self.said
        if self.several:
            parts = (f"{name} = {value}" if value else name for name, value in self.several)
            said = f"no counterpart: {', '.join(parts)}"
        return printable(f"{self.key}{' = ' if self.value else ''}{self.value}: {said}")
