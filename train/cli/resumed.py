"""`train check --resume`: does what `train run --resume` does before it trains, but writes nothing.

A run in a store is checked by copies of its run.json and of the state.json of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prep.fs.place import Place
from train.cli.run import of_run, start_of
from train.parallel.ranks import ALONE

if TYPE_CHECKING:
    from prep.errors import Problem
    from prep.progress import Progress
    from prep.training.schema import Config
    from train.runs.resume import ResumeComparison, Start
    from train.setup import CheckReport, RunRequest, Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """A run that is to be continued."""

    place: Place  # as named
    start: Start | None  # None: it is in a store and has no checkpoint yet, so that it begins
    adopt: bool
    compared: ResumeComparison | None = None  # with what it is to be continued; None: there are faults before that


def find(place: Place, named: str | None, adopt: bool, init: Path | None) -> Resumed:
    """The run and its checkpoint. Raises `PathError`, `CacheError`, `UsageError` for options that contradict it."""
    from train.runs.checkpoint import list_checkpoints
    from train.runs.stored.reading import for_resume

    run = for_resume(place)
    if run.origin is not None and init is None and not list_checkpoints(run.path):
        return Resumed(place=place, start=None, adopt=adopt)
    start = start_of(run, True, named, adopt, init, ALONE, complete=not run.partial)
    return Resumed(place=place, start=start, adopt=adopt)


def check(resumed: Resumed, request: RunRequest, config: Config, progress: Progress
          ) -> tuple[Resumed, CheckReport]:
    """The report on the run as it would be continued, with what differs from its checkpoint."""
    from train.check import check
    from train.runs.resume import compare

    start = resumed.start
    if start is None:
        report = check(request, config, progress=progress)
    else:
        report = check(of_run(request, start.run), config, planned=start.planned, progress=progress)
    if report.setup is None:
        return resumed, report
    faults = _place_faults(resumed, report.setup)
    if start is not None:
        compared = compare(start, report.setup, adopt=resumed.adopt)
        resumed = replace(resumed, compared=compared)
        faults += compared.faults
        accepted = (f"accepted: {what}" for what in compared.adopted)
        report = replace(report, notes=(*report.notes, *compared.notes, *accepted, *_set_aside(start)))
    return resumed, replace(report, faults=tuple(faults), setup=None if faults else report.setup)


def _newer(start: Start) -> list[str]:
    """The run's checkpoints after that which it is to be continued from."""
    from train.runs.checkpoint import list_checkpoints

    return [folder.name for folder in list_checkpoints(start.run.path) if int(folder.name[5:]) > start.state.step]


def _set_aside(start: Start) -> Iterator[str]:
    if newer := _newer(start):
        yield f"the run would set newer checkpoints aside: {', '.join(newer)}"


def _place_faults(resumed: Resumed, setup: Setup) -> list[Problem]:
    """The fault of the run's directory, if it has one."""
    from prep.errors import Problem
    from train.runs.directory import check_place, check_writable
    from train.runs.stored.stored import kept_in

    storage = kept_in(resumed.place)
    try:
        check_place(storage.folder, setup.manifest)
        check_writable(storage.folder)
        storage.check_space(setup, 0 if resumed.start is None else resumed.start.state.step)
    except Problem as problem:
        return [problem]
    return []


def line(resumed: Resumed, setup: Setup | None) -> str:
    """From which step the run would be continued, as a line."""
    if resumed.start is None:
        return f"{resumed.place} has no checkpoint yet: the run begins"
    name, step = resumed.start.folder.name, resumed.start.state.step
    if setup is None:
        return f"{resumed.place} is at {name}"
    end = f"to step {setup.steps}" if step < setup.steps else "and has no step left"
    return f"continues {resumed.place} from {name} {end}"


def as_json(resumed: Resumed) -> dict[str, Any]:
    """From which step the run would be continued, and what differs, as a JSON document."""
    start, compared = resumed.start, resumed.compared
    return {"checkpoint": None if start is None else start.folder.name,
            "step": 0 if start is None else start.state.step,
            "newer": [] if start is None else _newer(start),
            "changes": [] if compared is None else list(compared.notes),
            "adopted": [] if compared is None else list(compared.adopted)}
