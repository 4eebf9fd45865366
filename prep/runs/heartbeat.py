"""RUN/heartbeat.json: which process trains a run, where, and what it was doing a moment ago.

    {"format": "latentry/heartbeat", "version": 1, "token": "9f…", "pid": 4711, "host": "gpu-7", "boot": "4f0c…",
     "start": "88213", "time": 1764078000.1, "phase": "training", "since": 1764077000.2, "step": 120,
     "stepped": 1764077996.0, "asked": ["sample"], "ended": null}

`train run` replaces it every few seconds, also while it loads, validates and samples, and removes it at the end of a
run that finished or was stopped. After a failure it stays, and `ended` says why. `boot` and `start` tell a process from
a later one of the same number: on its own computer a process that is gone is known at once, on another one by the age
of its last sign.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from prep.fs.untrusted import read_regular
from prep.parse import Unparsed, count, expect, list_of, one_of, within

NAME = "heartbeat.json"
FORMAT, VERSION = "latentry/heartbeat", 1
MOST = 1 << 14  # bytes
FRESH = 60.0  # seconds after which a process on another computer may be gone: clocks and network disks are late
TEXT = 500  # characters of a phase and of why it ended

Kind = Literal["stop", "sample"]
KINDS: tuple[Kind, ...] = ("stop", "sample")
Life = Literal["running", "gone", "silent", "failed"]  # silent: nothing was heard of another computer for a while


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The process that trains a run, and what it was doing."""

    token: str  # drawn by each process
    pid: int
    host: str
    boot: str  # of the computer, and of the process's container; "": not known
    start: str  # when the process began, in the computer's own count; "": not known
    time: float  # of this heartbeat, seconds since 1970
    phase: str
    since: float  # when the phase began
    step: int  # done
    stepped: float  # when that was
    asked: tuple[Kind, ...] = ()  # requests that it has taken and not yet done
    ended: str | None = None  # why it failed

    def spell(self) -> bytes:
        """The content of the file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode() + b"\n"

    @property
    def life(self) -> Life:
        """Whether the process is there now."""
        if self.ended is not None:
            return "failed"
        if self.boot and self.boot == boot_id() and self.host == platform.node():
            return "running" if is_running(self.pid, self.start) else "gone"
        return "running" if self.age < FRESH else "silent"

    @property
    def age(self) -> float:
        """Seconds since the heartbeat, by the clock of this computer."""
        return max(0.0, time.time() - self.time)


def read_heartbeat(run: Path) -> Heartbeat | None:
    """The newest heartbeat of a run; `None` if there is none that can be read."""
    try:
        body = expect(json.loads(read_regular(run / NAME, MOST)), dict, "it")
        return _parsed(body)
    except (OSError, ValueError, RecursionError, Unparsed):
        return None


def _parsed(body: dict[str, Any]) -> Heartbeat | None:
    """The heartbeat in a document, if it is one of this version. Raises `Unparsed`."""
    if body.get("format") != FORMAT or body.get("version") != VERSION:
        return None
    values: dict[str, Any] = {name: read(body.get(name), name) for names, read in (
        (("token", "host", "boot", "start", "phase"), _text), (("time", "since", "stepped"), _time),
        (("pid", "step"), _whole)) for name in names}
    requests = list_of(body.get("asked"), lambda value, where: one_of(value, KINDS, where), "asked")
    ended = None if body.get("ended") is None else _text(body["ended"], "ended")
    return Heartbeat(**values, asked=tuple(kind for kind in KINDS if kind in requests), ended=ended)


def _text(value: Any, where: str) -> str:
    return expect(value, str, where)[:TEXT]


def _whole(value: Any, where: str) -> int:
    return count(value, where, (1 << 31) - 1)  # of a step, or a process


def _time(value: Any, where: str) -> float:
    seconds = expect(value, float, where)
    within(seconds, 0, 1 << 40, where)
    return seconds


def own_start() -> str:
    """When this process began, as `start` has it."""
    return start_of(os.getpid()) or ""


def boot_id() -> str:
    """Identifies this computer since its last start, and the processes that this one can see; "" where the system does
    not say."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return "" if sys.platform == "win32" else platform.node()


def is_running(pid: int, start: str) -> bool:
    """Whether the process of this number that began then still runs on this computer."""
    if sys.platform == "win32":  # where signal 0 is Ctrl-C; `boot_id` is "" there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    began = start_of(pid)
    return began is None or (began != "" and start in ("", began))


def start_of(pid: int) -> str | None:
    """When a process began, in ticks since the system's start; "" for one that has ended and is still listed, `None`
    where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, ValueError, IndexError):
        return None
