"""A note on a setting of another tool."""

from __future__ import annotations

from dataclasses import dataclass

from prep.formatting import printable


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionNote:
    """A note on a setting of another tool that has no counterpart here, or another meaning."""

    key: str  # with its place in the file: datasets[0].subsets[1].color_aug
    value: str  # as in the file, truncated; "" if it is secret or absent
    said: str  # what happens to it here
    at: str  # the place in the recipe that it concerns; "": the whole recipe; "train.toml": that file

    @property
    def text(self) -> str:
        """The note on one line, with control characters escaped."""
        return printable(f"{self.key}{' = ' if self.value else ''}{self.value}: {self.said}")
