"""`prep jobs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say
from prep.cli.signature import complete
from prep.errors import EXIT_FINDINGS, UsageError
from prep.formatting import counted, printable
from prep.fs.paths import resolve
from prep.fs.place import require_local
from prep.parse import suggest

if TYPE_CHECKING:
    from prep.jobs.job import Job

ACTIONS = {
    "list": "the jobs, with their states",
    "add": "a command, after --; it waits for its turn",
    "run": "start what waits, one a device at a time, until nothing waits or runs",
    "stop": "ask a job to stop after what it is at; remove one that waits",
    "again": "add the command of a job that is over; training goes on from its last checkpoint",
    "first": "give a job that waits the next turn",
    "remove": "remove a job that does not run, and its log",
    "log": "what a job printed",
}
NAMED = ("stop", "again", "first", "remove", "log")
TAIL = 1 << 20  # bytes of a log


def jobs(
    action: Annotated[str, typer.Argument(metavar=f"[{'|'.join(ACTIONS)}]", autocompletion=complete(ACTIONS),
                                          help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()),
                                          show_default=False)],
    project: Annotated[Path, typer.Argument(metavar="PROJECT", help="the directory in which the commands are run; "
                                            "PROJECT/jobs has the queue", show_default=False)],
    words: Annotated[list[str] | None, typer.Argument(
        metavar="[JOB|COMMAND]...", help="the number of a job; for add, a command after two dashes",
        show_default=False)] = None,
    now: Annotated[bool, typer.Option("--now", help="stop at once, and all that the job started")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Let commands wait for one another: a queue of a project, whose jobs outlive the terminal.

    A job is a command of prep or train, in a process of its own. Ctrl-C in prep jobs run ends the starting of further
    jobs, and no job.
    """
    from prep.jobs import queue
    from prep.jobs.job import jobs_document
    from prep.jobs.runner import Runner

    place, given = resolve(require_local(project, "PROJECT")), list(words or ())
    _check(action, given, now=now)
    before = set[str]()
    if action == "run":
        _interruptible()
        before = {job.name for job in queue.jobs_of(place) if job.is_over}
        Runner(place).run(_Changes(quiet=quiet or as_json))
    elif action == "add":
        _told(queue.add(place, given), as_json=as_json)
        return
    elif action == "log":
        put(_log(queue.job_of(place, given[0])))
        return
    elif action in NAMED:
        job = given[0]
        _told(queue.stop(place, job, "now" if now else "soon") if action == "stop" else queue.again(place, job)
              if action == "again" else queue.first(place, job) if action == "first" else queue.remove(place, job),
              as_json=as_json)
        return
    found = queue.jobs_of(place)
    if as_json:
        put_json(jobs_document(found))
    elif action == "list":
        put("\n".join(map(_line, found)) if found else "no jobs")
    if action == "run" and any(job.state in ("failed", "lost") and job.name not in before for job in found):
        raise typer.Exit(EXIT_FINDINGS)


def _check(action: str, given: Sequence[str], *, now: bool) -> None:
    """Raises `UsageError` for words that the action has no use for, or lacks."""
    if action not in ACTIONS:
        raise UsageError(f"prep jobs has no {printable(action)}{suggest(action, ACTIONS)}",
                         hint=f"one of: {', '.join(ACTIONS)}")
    if now and action != "stop":
        raise UsageError(f"--now is for stop, but {action} is given", hint="leave --now out")
    if action == "add" and not given:
        raise UsageError("no command is given, expected one after --",
                         hint="prep jobs add PROJECT -- train run manifest.json -o run")
    wanted = len(given) if action == "add" else int(action in NAMED)
    if len(given) != wanted:
        raise UsageError(f"{action} is given {counted(len(given), 'word')} after the project, expected "
                         f"{'the number of a job' if wanted else 'none'}", hint="prep jobs list PROJECT")


def _interruptible() -> None:
    from prep.cli.console import explain_interruption

    explain_interruption("jobs that run go on; those that wait are kept", "prep jobs run PROJECT starts them")


def _told(job: Job, *, as_json: bool) -> None:
    from prep.jobs.job import jobs_document

    if as_json:
        put_json(jobs_document([job]))
    else:
        put(_line(job))


def _line(job: Job) -> str:
    """A job in a line: number, state, how long, what it does, and its command."""
    return f"{job.name}  {printable(job.says)}  {printable(job.command)}"


class _Changes:
    """Says when the state of a job changes."""

    def __init__(self, *, quiet: bool) -> None:
        self._states: dict[str, str] = {}
        self._quiet = quiet

    def __call__(self, found: Sequence[Job]) -> None:
        for job in found:
            if self._states.get(job.name, "") not in ("", job.state) and not self._quiet:
                say(_line(job))
            self._states[job.name] = job.state


def _log(job: Job) -> str:
    """The end of what a job printed, as text for a terminal."""
    from prep.jobs.log import tail

    return "\n".join(printable(line) for line in tail(job, TAIL).splitlines())
