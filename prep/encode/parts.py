"""Divides the tasks of a plan among the jobs of an array, by their keys: every caller finds the same shares."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prep.errors import UsageError

MOST = 100_000  # parts; clusters allow arrays of a thousand to some ten thousand jobs
DIGITS = 16  # hex digits of a key that decide its part: keys are digests, so they spread evenly


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Part:
    """One of several equal shares of a plan."""

    number: int  # from 0
    count: int

    def has(self, key: str) -> bool:
        """Whether the task (or row) with this key belongs to this part."""
        return part_of(key, self.count) == self

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def part_of(key: str, count: int) -> Part:
    """The part of so many that a key belongs to."""
    return Part(number=int(key[:DIGITS], 16) % count, count=count)


def parse_part(text: str) -> Part:
    """The part that `I/N` names. Raises `UsageError`."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not found or not int(found[1]) < int(found[2]) <= MOST:
        raise UsageError(f"--part is '{text}', expected I/N with I from 0 to N-1 and N at most {MOST}",
                         hint="--part 0/4, --part 1/4, --part 2/4 and --part 3/4 share the work of four jobs")
    return Part(number=int(found[1]), count=int(found[2]))
