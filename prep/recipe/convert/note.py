"""A note on a setting of another tool's."""

from __future__ import annotations

from dataclasses import dataclass

from prep.formatting import printable


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionNote:
    """A setting of another tool's that has no counterpart, or another meaning, here."""

    key: str  # with where it is in the file: datasets[0].subsets[1].color_aug
    value: str  # as the file says it, cut; "" where it is nobody's business, or where there is none
    said: str  # what becomes of it here
    at: str  # the place in the recipe that it concerns; "": the whole; "train.toml": that file

    @property
    def text(self) -> str:
        """The note on one line, whatever is in the file."""
        return printable(f"{self.key}{' = ' if self.value else ''}{self.value}: {self.said}")
