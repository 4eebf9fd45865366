"""Builds the apps of `prep` and `train` with their shared options: --version, -h, --no-color, shell completion."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from prep.cli.console import put
from prep.cli.signature import Command, append, parameter

LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "pillow")


def _show_version(context: typer.Context, asked: bool) -> None:
    if asked:
        put(version_text(context.find_root().info_name or "latentry"))
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="show versions and exit", callback=_show_version,
                                       is_eager=True)]
NoColor = Annotated[bool, typer.Option("--no-color", help="plain text, also on a terminal (as with NO_COLOR set)")]


def make_app(text: str, commands: Iterable[Command]) -> typer.Typer:
    """An app with the help `text` and `commands` in this order."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, help=text,
                      context_settings={"help_option_names": ["-h", "--help"]})

    app.callback()(_global_options)
    for command in commands:
        app.command()(append(command, [parameter("no_color", NoColor, False)]))
    return app


def _global_options(version: Version = False, no_color: NoColor = False) -> None:
    """Does nothing: --version acts in its callback, --no-color in `console.run`."""


def version_text(name: str) -> str:
    """The versions of this program, Python and its main libraries, read from their metadata without importing them."""
    from importlib.metadata import PackageNotFoundError, version

    def found(library: str) -> str:
        try:
            return version(library)
        except PackageNotFoundError:
            return "not installed"

    return "\n".join([f"{name} (Latentry) {found('latentry')}", f"Python {sys.version.split()[0]}",
                      *(f"{library} {found(library)}" for library in LIBRARIES)])
