"""The process that keeps a job: starts its command, notes how it ended, and stops it when asked.

It is a daemon in a session of its own, so neither the end of whoever started it nor a Ctrl-C there ends the job.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from prep.errors import PathError, first_line
from prep.fs import atomic
from prep.fs.untrusted import append_regular
from prep.jobs.job import CHILD, Job, asked, read_job
from prep.jobs.log import LOG
from prep.jobs.process import end, start
from prep.progress import FILE
from prep.runs.heartbeat import boot_id, start_of

PAUSE = 0.3  # seconds between looks for a request to stop
TOUCH = 5.0  # seconds between signs of life
GRACE = 60.0  # seconds that a command has to end once the computer's shutdown has stopped its keeper
_told: list[int] = []  # signals that the keeper got


def main() -> None:
    """Keeps the job whose directory is the last word of the command line, unless another keeper has it."""
    if hasattr(os, "fork") and os.fork():
        os._exit(0)  # so that whoever started it need not wait for its end
    folder = Path(sys.argv[-1])
    job = read_job(folder)
    if job is None or not claim(folder):
        sys.exit(1)
    with suppress(ValueError, OSError):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _note)
    code, stopped = PathError.exit_code, False
    with suppress(OSError):  # a link or a pipe has the name of its log
        code, stopped = _kept(job)
    body = {"code": code, "stopped": stopped, "time": time.time()}
    atomic.write_atomic(folder / "ended.json", json.dumps(body).encode() + b"\n")


def claim(folder: Path) -> bool:
    """Notes that this process keeps the job; False if another does."""
    return atomic.create_exclusive(folder / "started.json", _card(os.getpid()))


def _card(pid: int) -> bytes:
    """A process as documents of jobs name it."""
    body = {"pid": pid, "start": start_of(pid) or "", "boot": boot_id(), "host": platform.node(), "time": time.time()}
    return json.dumps(body).encode() + b"\n"


def _note(number: int, _frame: FrameType | None) -> None:
    _told.append(number)


def _kept(job: Job) -> tuple[int, bool]:
    """Runs the command to its end: its exit code, and whether it was stopped."""
    with append_regular(job.folder / LOG) as log:
        try:
            child = start(job.words, job.folder.parents[1], out=log, err=subprocess.STDOUT,
                          more={FILE: str(job.folder / "progress.jsonl")})
        except (OSError, ValueError) as error:  # its words are too long for the system, or no text of it
            log.write(f"error: the command cannot be started: {first_line(error)}\n".encode(errors="replace"))
            return PathError.exit_code, False
        with suppress(OSError):
            atomic.write_passing(job.folder / CHILD, _card(child.pid))
        stopped, touched, told_at = "", time.monotonic(), 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(PAUSE)
                return (code if code >= 0 else 128 - code), stopped != "" and code != 0
            wanted = asked(job.folder) or ("soon" if _told else "")
            if _told and told_at and time.monotonic() - told_at > GRACE:
                wanted = "now"
            if wanted and wanted != stopped:
                stopped, told_at = wanted, told_at or time.monotonic()
                end(child.pid, now=wanted == "now")
            if time.monotonic() - touched > TOUCH:
                touched = time.monotonic()
                with suppress(OSError):
                    os.utime(job.folder / "started.json")
