"""The shortest value of `lora.targets` that means given layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from train.models.targets import Presets, endings, is_named

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def targets_of(wanted: Iterable[str], layers: Iterable[str], presets: Presets) -> str | tuple[str, ...]:
    """A preset that means exactly the layers `wanted`, or else a list, as short as a greedy choice makes it."""
    remaining, names = set(wanted), list(layers)
    for preset, ends in presets.items():
        if remaining == {name for name in names if any(is_named(name, end) for end in ends)}:
            return preset
    fitting = {pattern: matches for pattern, matches in _patterns(names).items() if matches <= remaining}
    chosen: list[str] = []
    while remaining:
        best = max(fitting, key=lambda pattern: (len(fitting[pattern] & remaining), -len(pattern), pattern))
        chosen.append(best)
        remaining -= fitting[best]
    return tuple(chosen)


def _patterns(names: list[str]) -> Mapping[str, set[str]]:
    """Suffixes, blocks, and names with any number → the layers that they mean."""
    matches: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".")
        blocks = (".".join([*parts[:end], "*"]) for end in range(1, len(parts)))
        for pattern in (name, *endings(name), *blocks):
            matches.setdefault(pattern, set()).add(name)
    alike: dict[str, set[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("*", name), set()).add(name)
    for pattern in alike.keys() - matches.keys():
        matches[pattern] = {name for name in names if is_named(name, pattern)}
    return matches
