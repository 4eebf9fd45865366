"""The `train` commands; each has its own module in this package."""

from __future__ import annotations

from typing import NoReturn

from prep.cli.app import make_app
from prep.cli.console import run as run_app
from train.cli.check import check
from train.cli.evaluate import evaluate
from train.cli.extract import extract
from train.cli.init import init
from train.cli.merge import merge
from train.cli.push import push
from train.cli.replay import replay
from train.cli.report import report
from train.cli.resize import resize
from train.cli.run import run
from train.cli.sample import sample
from train.cli.sample_now import sample_now
from train.cli.stop import stop
from train.cli.worst import worst

app = make_app("Trains from a manifest and its cache. Never encodes a picture or a caption while training.",
               {"Train": (init, check, run, stop, sample_now),
                "Look at a run": (report, worst, replay, sample, evaluate),
                "Use the result": (merge, resize, extract, push)})


def main() -> NoReturn:
    """The console script `train`."""
    run_app(app, "train")
