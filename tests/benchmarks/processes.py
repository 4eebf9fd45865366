"""Runs Python in processes of their own, and says what memory and CPU time they took."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAUSE = 0.05  # seconds between looks at memory
SELDOM = 4  # looks, for each at all processes of the computer for those that descend: it takes a core, if done always


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What a process took."""

    resident: int  # bytes at its highest, with mapped files
    anonymous: int  # bytes that are not of files, of it and its children, at their highest
    cpu: float  # seconds of it and its children
    out: str  # on stdout
    told: str  # on stderr


def measured(words: Sequence[str], root: Path, *, until: Callable[[], bool] = lambda: False) -> Taken:
    """Runs Python with these words in `root`, and kills it when `until` becomes true. Exits if it fails otherwise."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1",
                   "LATENTRY_USER_CACHE": str(root / "user")}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        child = subprocess.Popen([sys.executable, *words], cwd=root, env=environment, stdout=out, stderr=told)
        resident = anonymous = ended = status = looks = 0
        killed = False
        family = {child.pid}
        while not ended:
            if looks % SELDOM == 0:
                family = family_of(child.pid)
            looks += 1
            resident = max(resident, memory_of(child.pid, "VmHWM:"))
            anonymous = max(anonymous, sum(memory_of(pid, "RssAnon:") for pid in family))
            if not killed and until():
                child.kill()
                killed = True
            time.sleep(PAUSE)
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
        child.returncode = os.waitstatus_to_exitcode(status)
        texts = [file.seek(0) or file.read().decode() for file in (out, told)]
    if child.returncode and not killed:
        sys.exit(f"{' '.join(words)} failed with {child.returncode}:\n{texts[1]}")
    return Taken(resident=resident, anonymous=anonymous, cpu=usage.ru_utime + usage.ru_stime, out=texts[0],
                 told=texts[1])


def memory_of(pid: int, name: str) -> int:
    """The value in bytes of a process's /proc/PID/status; 0: it has ended."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().split(name)[1].split()[0]) << 10
    return 0


def family_of(pid: int) -> set[int]:
    """A process and those that descend from it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, grown = set[int](), {pid}
    while grown:
        found |= grown
        grown = {child for child, parent in parents.items() if parent in found} - found
    return found
