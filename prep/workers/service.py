"""Defines the work of a pool: tasks, each with the types of its question and of its answer's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Question = TypeVar("Question")
Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a worker may use for one question."""

    seconds: float
    memory: int  # bytes of address space, libraries included


# For what decodes files. Seconds: the largest pictures that are decoded take 10. Bytes of address space: 2^28 pixels of
# 16 bits with alpha take 6 GiB.
DECODING = Limits(seconds=60, memory=8 << 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task(Generic[Question, Part]):
    """One kind of work. An answer comes in parts, so that no message holds a million rows."""

    name: str
    question: type[Question]
    part: type[Part]
    work: Callable[[Question], Iterable[Part]]  # its result depends on the files alone


def _nothing() -> None:
    """No preparation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """The tasks of a worker. Workers import this record from `module`, under the name `SERVICE`."""

    module: str
    tasks: tuple[Task[Any, Any], ...]
    prepare: Callable[[], None] = _nothing  # called once, in the worker, before it is ready
