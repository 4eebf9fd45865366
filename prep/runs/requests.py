"""Asks the process that trains a run to stop after the step, or to draw sample pictures after it.

    RUN/stop.request    RUN/sample.request    the token of the process that is asked, as heartbeat.json has it

`train run` looks at them beside its steps and removes them. One for an earlier process is removed, and not obeyed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from prep.errors import PathError
from prep.formatting import duration, printable, shell_name
from prep.fs import atomic
from prep.fs.place import Local
from prep.fs.untrusted import read_regular
from prep.runs.document import read_document
from prep.runs.heartbeat import KINDS, Heartbeat, Kind, read_heartbeat

MOST = 128  # bytes: a token
ASKED: dict[Kind, str] = {"stop": "stops after the step that it is at, and saves a checkpoint",
                          "sample": "draws sample pictures after the step that it is at"}


def request_path(run: Path, kind: Kind) -> Path:
    """The file of a request."""
    return run / f"{kind}.request"


def ask(run: Local, kind: Kind) -> Heartbeat:
    """Asks the process that trains a run; returns its heartbeat. Raises `PathError` if none does, or it is no run."""
    beat = read_heartbeat(run.path)
    if beat is None:
        read_document(run.path)  # before its first step a run has no other file than a heartbeat
    if beat is None or beat.life != "running":
        raise PathError(f"no process trains {run}{_why(beat)}", hint="train run --resume -o "
                        f"{shell_name(str(run))} continues it, unless it has finished")
    atomic.write_passing(request_path(run.path, kind), beat.token.encode() + b"\n")
    return beat


def _why(beat: Heartbeat | None) -> str:
    if beat is None:
        return ""
    who = f"process {beat.pid} on {printable(beat.host)}"
    if beat.life == "silent":
        return f": the last sign of {who} is {duration(beat.age)} old"
    return f": {who} {'failed' if beat.life == 'failed' else 'has ended'}"


def is_asked(run: Path, kind: Kind, token: str) -> bool:
    """Whether a process of this token is asked; removes the request, also one to an earlier process."""
    path = request_path(run, kind)
    try:
        data = read_regular(path, MOST)
    except FileNotFoundError:
        return False
    except OSError:
        data = b""
    with suppress(OSError):
        path.unlink()
    return data.decode("utf-8", "replace").strip() == token


def forget_requests(run: Path) -> None:
    """Removes requests to earlier processes."""
    for kind in KINDS:
        with suppress(OSError):
            request_path(run, kind).unlink(missing_ok=True)


def waiting(run: Path, beat: Heartbeat | None) -> list[Kind]:
    """The requests that the process has taken, or will find."""
    if beat is None or beat.life != "running":
        return []
    return [kind for kind in KINDS if kind in beat.asked or request_path(run, kind).is_file()]


def reply(kind: Kind, beat: Heartbeat) -> str:
    """Says what a process will do about a request, in a sentence without a full stop."""
    return f"process {beat.pid} on {printable(beat.host)} {ASKED[kind]}"
