"""The words that differ between two captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Literal

from prep.pages.parts import Words

COMPARED = 600  # words of a caption


def compared(old: Sequence[str], new: Sequence[str]) -> Words:
    """Compares the words of the first caption that differs."""
    return tuple(_compared(old, new))


def _compared(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[Literal["same", "gone", "new"], str]]:
    place = next((place for place, (first, second) in enumerate(zip(old, new, strict=False)) if first != second),
                 min(len(old), len(new)))
    before, after = (captions[place].split()[:COMPARED] if place < len(captions) else [] for captions in (old, new))
    for tag, first, last, begin, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            yield "same", " ".join(before[first:last])
            continue
        if last > first:
            yield "gone", " ".join(before[first:last])
        if end > begin:
            yield "new", " ".join(after[begin:end])
