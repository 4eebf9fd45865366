"""A job of a project: a command of ours that waits, runs or has ended, as its directory tells.

    PROJECT/jobs/000012/job.json       {"format": "latentry/job", "version": 1, "words": ["train", "run", …],
                                        "added": 1764078000.1}: written once
    PROJECT/jobs/000012/started.json   {"pid": …, "start": …, "boot": …, "host": …, "time": …} of its keeper, which
                                        touches it every few seconds
    PROJECT/jobs/000012/child.json     the same of its command, which may outlive its keeper
    PROJECT/jobs/000012/log.txt        what it prints
    PROJECT/jobs/000012/progress.jsonl what it does and how far it is, a line every few seconds
    PROJECT/jobs/000012/stop.request   "soon" or "now"
    PROJECT/jobs/000012/ended.json     {"code": …, "stopped": …, "time": …}

Each file is whole or absent, so what is said of a job after a crash is what happened. Words are arguments of `prep` or
`train`: no shell ever reads them, and no other program is started.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prep.errors import EXIT_FINDINGS, PathError, UsageError
from prep.formatting import brief_duration, printable, shell_name
from prep.fs.untrusted import check_dir, entries, open_regular, read_regular, stream_of
from prep.parse import Unparsed, count, expect, list_of, within
from prep.runs.heartbeat import boot_id, is_running

FORMAT, VERSION = "latentry/job", 1
FOLDER, CHILD = "jobs", "child.json"
PROGRAMS = {"prep": "prep.cli.main", "train": "train.cli.main"}  # and the modules with their `main`
MOST = 1 << 20  # bytes of a document
MOST_WORDS, LONGEST = 1000, 1 << 16  # of a command, and its characters, which take 12 bytes in JSON at most
STARTERS = ("jobs", "studio")  # commands of prep that start jobs: the one waits for itself, the other prints its token
FRESH = 60.0  # seconds after which a keeper that cannot be asked, and was not heard of, is gone
DIGITS = 6

State = Literal["waiting", "running", "done", "failed", "stopped", "lost"]
Stop = Literal["soon", "now"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job, as its directory was a moment ago."""

    folder: Path
    words: tuple[str, ...]
    added: float  # seconds since 1970, like all times here
    started: float | None = None
    ended: float | None = None
    code: int | None = None  # of its exit
    state: State = "waiting"
    stopping: Stop | None = None  # what it is asked
    doing: str = ""  # while it runs: the stage that it is at
    done: int = 0  # of that stage
    total: int | None = None
    alone: int | None = None  # the process of its command, which runs though its keeper is gone

    @property
    def name(self) -> str:
        """Its number, as text: the name of its directory."""
        return self.folder.name

    @property
    def command(self) -> str:
        """The command, as it is typed in the project's directory."""
        return " ".join(shell_name(word) for word in self.words)

    @property
    def device(self) -> str:
        """The device that its command names; "": none in particular."""
        return self.option("--device")

    def option(self, flag: str, short: str = "") -> str:
        """What its command gives for an option, the last time; "": nothing. The spellings are those of click."""
        found = ""
        for word, value in zip(self.words, (*self.words[1:], ""), strict=True):
            if word == "--":
                break
            if word in (flag, short):
                found = value
            elif word.startswith(f"{flag}="):
                found = word.partition("=")[2]
            elif short and word.startswith(short):
                found = word.removeprefix(short)
        return found

    @property
    def is_over(self) -> bool:
        """Whether it neither waits nor runs."""
        return self.state not in ("waiting", "running")

    @property
    def says(self) -> str:
        """Its state in words, with how long it took and what it does."""
        if self.state == "running" and self.started is not None:
            share = f" {100 * self.done // self.total} %" if self.total else ""
            return ", ".join(filter(None, ("stopping" if self.stopping else "running",
                                           "" if self.alone is None else "without its keeper",
                                           brief_duration(time.time() - self.started), self.doing + share)))
        if self.is_over and self.started is not None and self.ended is not None:
            code = f" with {self.code}" if self.state == "failed" else " with findings" if (
                self.state == "done" and self.code == EXIT_FINDINGS) else ""
            return f"{self.state}{code} after {brief_duration(self.ended - self.started)}"
        return self.state

    def as_json(self) -> dict[str, Any]:
        """The job in documents of commands and of the pages."""
        return {"name": self.name, "words": list(self.words), "command": self.command, "state": self.state,
                "says": self.says, "added": self.added, "started": self.started, "ended": self.ended, "code": self.code,
                "stopping": self.stopping, "doing": self.doing, "done": self.done, "total": self.total}


def written_by(job: Job) -> list[str]:
    """Where a command of training has its run: what it names with -o, else runs/STEM of a manifest that it names."""
    output = job.option("--output", "-o")
    return [output] if output else [f"runs/{Path(word).stem}" for word in job.words if word.endswith(".json")]


def jobs_document(jobs: Sequence[Job], **more: Any) -> dict[str, Any]:
    """Jobs as `prep jobs --json` and the pages of `prep studio` tell them, with what else is told."""
    return {"format": "latentry/jobs", "version": 1, **more, "jobs": [job.as_json() for job in jobs]}


def checked_words(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command. Raises `UsageError` for those of another program, or too many."""
    if not words or words[0] not in PROGRAMS or len(words) < 2:
        raise UsageError(f"the command is {printable(' '.join(words)[:100]) or 'empty'}, expected one of prep or train",
                         hint="such as: train run manifest.json -o run")
    if words[0] == "prep" and words[1] in STARTERS:
        raise UsageError(f"the command is prep {words[1]}, which starts jobs itself", hint="use it in a terminal")
    if any("\0" in word for word in words):
        raise UsageError("the command has a null character, which no program takes", hint="leave it out")
    size = sum(map(len, words))
    if len(words) > MOST_WORDS or size > LONGEST:
        raise UsageError(f"the command has {len(words)} words of {size} characters, expected at most {MOST_WORDS} of "
                         f"{LONGEST}", hint="put its settings into a file")
    return tuple(words)


def read_job(folder: Path) -> Job | None:
    """The job of a directory; `None` if there is none, or none that can be read."""
    try:
        check_dir(folder)
        body = _document(folder / "job.json")
        if body.get("format") != FORMAT or body.get("version") != VERSION:
            return None
        words = checked_words(list_of(body.get("words"), lambda word, where: expect(word, str, where), "words"))
        added = _time(body.get("added"), "added")
    except (OSError, ValueError, RecursionError, Unparsed, UsageError):
        return None
    started, ended = _facts(folder / "started.json"), _facts(folder / "ended.json")
    state, alone = _state(started, ended, folder)
    if state == "lost" and (ended := _facts(folder / "ended.json")):  # its keeper noted the end, and went, meanwhile
        state, alone = _state(started, ended, folder)
    doing, done, total = _progress(folder) if state == "running" else ("", 0, None)
    return Job(folder=folder, words=words, added=added, started=started.get("time"), ended=ended.get("time"),
               code=ended.get("code"), state=state, stopping=asked(folder) if state == "running" else None,
               doing=doing, done=done, total=total, alone=alone)


def read_jobs(project: Path) -> list[Job]:
    """The jobs of a project, by number. Raises `PathError` if it is no directory."""
    if not project.is_dir():
        raise PathError(f"there is no directory {project}", hint="name the directory of a project")
    with suppress(FileNotFoundError):
        found = (read_job(Path(entry.path)) for entry in entries(project / FOLDER)
                 if entry.name.isdecimal() and len(entry.name) >= DIGITS)
        return sorted((job for job in found if job is not None), key=lambda job: int(job.name))
    return []


def asked(folder: Path) -> Stop | None:
    """How a job is asked to stop."""
    with suppress(OSError, ValueError):
        word = read_regular(folder / "stop.request", 16).decode("ascii").strip()
        return "now" if word == "now" else "soon" if word == "soon" else None
    return None


def _state(started: dict[str, Any], ended: dict[str, Any], folder: Path) -> tuple[State, int | None]:
    """The state, and the process of a command that runs without its keeper."""
    if ended:
        if ended.get("stopped"):
            return "stopped", None
        return "done" if ended.get("code") in (0, EXIT_FINDINGS) else "failed", None
    if not started:
        return "waiting", None
    if _is_here(started):
        child = _facts(folder / CHILD)
        if _runs(started):
            return "running", None
        if _runs(child):
            return "running", child["pid"]
        return "stopped" if _is_here(child) and asked(folder) else "lost", None
    with suppress(OSError):  # an archive may set any time
        fresh = abs(time.time() - (folder / "started.json").lstat().st_mtime) < FRESH
        return "running" if fresh else "lost", None
    return "lost", None


def _is_here(process: dict[str, Any]) -> bool:
    """Whether a process was started on this computer since its last start, where the system says so."""
    here = boot_id()
    return bool(here) and process.get("boot") == here and process.get("host") == platform.node()


def _runs(process: dict[str, Any]) -> bool:
    pid = process.get("pid", 0)
    return _is_here(process) and 0 < pid < 1 << 31 and is_running(pid, process.get("start", ""))


def _facts(path: Path) -> dict[str, Any]:
    """What a document says, as far as it is of the right kind."""
    kinds = {"pid": int, "start": str, "boot": str, "host": str, "code": int, "stopped": bool}
    try:
        body = _document(path)
        time_of = _time(body.get("time"), "time")
    except (OSError, ValueError, RecursionError, Unparsed):
        return {}
    return {"time": time_of, **{name: value for name, value in body.items()
                                if name in kinds and type(value) is kinds[name]}}


def _progress(folder: Path) -> tuple[str, int, int | None]:
    """The last line of progress.jsonl that is whole: the stage, what is done, and of how much."""
    with suppress(OSError, ValueError, RecursionError, Unparsed, IndexError):
        with stream_of(open_regular(folder / "progress.jsonl")) as handle:
            handle.seek(max(0, handle.seek(0, 2) - (1 << 13)))
            line = handle.read().split(b"\n")[-2]
        body = expect(json.loads(line), dict, "a line")
        done = count(body.get("done"), "done")
        total = None if body.get("total") is None else count(body["total"], "total")
        return expect(body.get("title"), str, "title")[:200], done if total is None else min(done, total), total
    return "", 0, None


def _document(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = expect(json.loads(read_regular(path, MOST)), dict, "the document")
    return body


def _time(value: Any, where: str) -> float:
    seconds: float = expect(value, float, where)
    within(seconds, 0, 1 << 40, where)
    return seconds
