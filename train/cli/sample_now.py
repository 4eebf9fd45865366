"""`train sample-now`."""

from __future__ import annotations

from train.cli import options as opt
from train.cli.stop import TrainedRun, request


def sample_now(folder: TrainedRun, as_json: opt.AsJson = False) -> None:
    """Ask the process that trains RUN to draw sample pictures after the step that it is at, as sample.every does.

    Returns at once; the pictures are in RUN/samples and in the log once they are drawn.
    """
    request(folder, "sample", as_json=as_json)
