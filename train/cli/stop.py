"""`train stop`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prep.cli.console import put, put_json
from prep.fs.place import place_of
from train.cli import options as opt

if TYPE_CHECKING:
    from prep.runs.heartbeat import Kind

TrainedRun = Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run that is being trained; the URL "
                                            "of one in a store works on the computer that trains it",
                                            show_default=False)]


def stop(folder: TrainedRun, as_json: opt.AsJson = False) -> None:
    """Ask the process that trains RUN to stop after the step that it is at, with a checkpoint, as Ctrl-C does there.

    Returns at once. train run --resume continues the run, once the process has ended.
    """
    request(folder, "stop", as_json=as_json)


def request(folder: Path, kind: Kind, *, as_json: bool) -> None:
    """Sends a request to the process that trains a run, and prints which it is. Raises `PathError` if none does here.
    """
    from prep.runs.requests import ask, reply
    from train.runs.stored.reading import trained_here

    beat = ask(trained_here(place_of(folder)), kind)
    if as_json:
        put_json({"format": "latentry/request", "version": 1, "request": kind, "pid": beat.pid, "host": beat.host,
                  "step": beat.step, "phase": beat.phase})
    else:
        put(reply(kind, beat))
