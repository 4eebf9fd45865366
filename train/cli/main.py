"""The `train` commands, each a module of its own beside this one."""

from __future__ import annotations

from typing import NoReturn

import typer

from prep.cli.console import run as run_app
from train.cli.check import check
from train.cli.run import run
from train.cli.sample import sample

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Trains from a manifest; never loads a VAE or a text encoder while it does.")

for command in (check, run, sample):
    app.command()(command)


def main() -> NoReturn:
    """The console script `train`."""
    run_app(app, "train")
