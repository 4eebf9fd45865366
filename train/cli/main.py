"""The `train` commands, each a module of its own beside this one."""

from __future__ import annotations

from typing import NoReturn

from prep.cli.app import make_app
from prep.cli.console import run as run_app
from train.cli.check import check
from train.cli.init import init
from train.cli.run import run
from train.cli.sample import sample

app = make_app("Trains from a manifest; never loads a VAE or a text encoder while it does.",
               (init, check, run, sample))


def main() -> NoReturn:
    """The console script `train`."""
    run_app(app, "train")
