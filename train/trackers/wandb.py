"""A run's numbers and sample pictures for Weights & Biases: the room of the library `wandb`.

Who logs in is that library's affair (`wandb login`, or WANDB_API_KEY): nothing of it is in a run's settings or files.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.fs.atomic import make_dirs, write_atomic
from prep.fs.untrusted import read_regular
from prep.runs.events import Event
from train.runs.stored.layout import WANDB_ID
from train.trackers.numbers import numbers

LOGIN = 30.0  # seconds that a prompt for a key waits on a terminal; training waits for it, too


class Wandb:
    """Sends the events of a run to a project. A resumed run continues the same one there, which keeps the steps that
    it has already."""

    def __init__(self, run: Path, project: str, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run, self._image = run, wandb.Image
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, login_timeout=LOGIN)
        self._sent = wandb.init(project=project, name=run.absolute().name, id=_id(run), resume="allow", dir=str(run),
                                config=dict(settings), settings=quiet)

    def __call__(self, event: Event) -> None:
        """Sends one event."""
        values: dict[str, Any] = dict(numbers(event))
        if event["event"] == "sample":
            values["samples"] = self._image(str(self._run / event["picture"]))
        if values:
            self._sent.log(values, step=event["step"])

    def close(self) -> None:
        """Sends what is left."""
        self._sent.finish()


def _id(run: Path) -> str:
    """The name of the run there, drawn once and kept in RUN/wandb/id.txt."""
    path = run / WANDB_ID
    if not path.is_file():
        make_dirs(path.parent)
        write_atomic(path, secrets.token_hex(8).encode())
    return read_regular(path, 64).decode("ascii")
