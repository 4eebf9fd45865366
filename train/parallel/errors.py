"""Errors of ranks: who says what failed, and where torchrun reads it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prep.errors import EXIT_BUG, Problem, first_line

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun sets it, to DIRECTORY/RANK/error.json


class RankFailed(Problem):
    """Another of several processes failed, which says why; the code is its own where it is known.

    All ranks raise this where all know of it: rank `rank` from its own error, which it alone shows.
    """

    exit_code = EXIT_BUG
    kind = "rank"

    def __init__(self, message: str, *, rank: int, hint: str = "", exit_code: int = EXIT_BUG) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.exit_code = exit_code


class RankLost(Problem):
    """The connection to another of several processes broke: it was killed, or its machine is gone."""

    exit_code = EXIT_BUG
    kind = "rank"


def lost(world: int, error: BaseException) -> RankLost:
    """The error for a broken connection."""
    return RankLost(f"another of the {world} ranks ended without a message ({first_line(error)})",
                    hint="its process was killed, or its machine is gone; --resume continues")


def record(error: BaseException) -> bool:
    """Writes an error where torchrun reads it for its report. Whether this rank shall say it: the first one of this
    machine that failed."""
    if not os.environ.get(ERROR_FILE):
        return True
    path = Path(os.environ[ERROR_FILE])
    message = {"message": text_of(error), "errorCode": code_of(error),
               "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError):
        path.write_text(json.dumps({"message": message}))
    try:
        (path.parent.parent / "first-failure").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # each says its own then
        return True
    return True


def report_of(error: BaseException) -> dict[str, Any]:
    """What the others are told of an error."""
    return {"text": text_of(error), "hint": getattr(error, "hint", ""), "code": code_of(error)}


def text_of(error: BaseException) -> str:
    """The message of an error; if it was not expected, with its class."""
    return error.message if isinstance(error, Problem) else f"{type(error).__name__}: {first_line(error)}"


def code_of(error: BaseException) -> int:
    """The exit code of an error."""
    code = getattr(error, "exit_code", EXIT_BUG)
    return code if isinstance(code, int) else EXIT_BUG
