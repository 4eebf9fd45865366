"""Starts commands of ours as processes apart from the one that starts them, and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from prep.jobs.job import PROGRAMS
from prep.runtime import main_of, python

NEW_GROUP = 0x00000200  # CREATE_NEW_PROCESS_GROUP of Windows


def start(words: Sequence[str], folder: Path, *, out: IO[bytes] | int, err: IO[bytes] | int,
          more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts `prep …` or `train …` in a directory, in a group of its own, with `more` in its environment.

    Raises `OSError`, and `ValueError` for words that are no text of the system.
    """
    apart = {"creationflags": NEW_GROUP} if sys.platform == "win32" else {"process_group": 0}
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **(more or {})}
    child: subprocess.Popen[bytes] = subprocess.Popen(
        python(*main_of(PROGRAMS[words[0]]), *words[1:]), cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=out, stderr=err, **apart)  # type: ignore[call-overload]
    return child


def end(pid: int, *, now: bool) -> None:
    """Asks a command that `start` started to end after what it is at; `now`: ends it, and all processes that it
    started."""
    with suppress(OSError):
        if sys.platform == "win32":
            os.kill(pid, signal.SIGTERM if now else signal.CTRL_BREAK_EVENT)
        elif now:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)
