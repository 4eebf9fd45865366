"""The records of a cache: shards, references to their rows, tasks, and rows that cannot be encoded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRef:
    """The location of a row: its shard's digest and its number there."""

    shard: str
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A unit of encoding work: the rows of one future shard, sorted by key."""

    key: str
    field: str
    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A row that could not be encoded, and why; stored in its task's commit, so that it is not retried every time."""

    key: str
    code: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A finished shard: its name, its number of rows, and the bytes of all its files."""

    digest: str
    rows: int
    bytes: int
