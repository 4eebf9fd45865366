"""Errors of ranks: what one of them tells the others when it fails, and what these raise then."""

from __future__ import annotations

from typing import Any

from prep.errors import EXIT_BUG, Problem, first_line

_TOLD = "told_to_all_ranks"


class RankFailed(Problem):
    """Another rank failed, with this message and exit code; the code of a bug if it could not tell its own."""

    exit_code = EXIT_BUG
    kind = "rank"

    def __init__(self, message: str, *, hint: str = "", exit_code: int = EXIT_BUG) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class RankLost(RankFailed):
    """The end of what ranks do together: a connection broke or must, or another rank failed where no other did."""


def mark_told(error: BaseException) -> None:
    """Marks an error that all ranks know of."""
    vars(error)[_TOLD] = True


def is_told(error: BaseException) -> bool:
    """Whether all ranks know of the error, or of that which caused it."""
    return _TOLD in vars(error) or (error.__cause__ is not None and is_told(error.__cause__))


def report_of(error: Exception) -> dict[str, Any]:
    """What the others are told of an error."""
    return {"text": text_of(error), "hint": getattr(error, "hint", ""), "code": code_of(error)}


def text_of(error: Exception) -> str:
    """The message of an error; if it was not expected, with its class."""
    return error.message if isinstance(error, Problem) else f"{type(error).__name__}: {first_line(error)}"


def code_of(error: Exception) -> int:
    """The exit code of an error."""
    code = getattr(error, "exit_code", EXIT_BUG)
    return code if isinstance(code, int) else EXIT_BUG
