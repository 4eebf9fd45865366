"""The records of a cache: shards, references to their rows, tasks, and rows that can never be made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRef:
    """Where a row is: its shard's digest and its place there."""

    shard: str
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The unit of encoding work: the rows that will make one shard, sorted by key."""

    key: str
    field: str
    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A row that could not be made, and why; kept in its task's commit so that it is not tried for ever."""

    key: str
    code: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A finished shard: its name, its number of rows, and the bytes of all its files."""

    digest: str
    rows: int
    bytes: int
