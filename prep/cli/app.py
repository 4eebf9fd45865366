"""Builds the apps of `prep` and `train` with their shared options: --version, -h, --no-color, shell completion."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from prep.cli.console import put
from prep.cli.signature import Command, append, parameter
from prep.errors import UsageError

LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "pillow")


def _show_version(context: typer.Context, requested: bool) -> None:
    if requested:
        put(version_text(context.find_root().info_name or "latentry"))
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="show versions and exit", callback=_show_version,
                                       is_eager=True)]
NoColor = Annotated[bool, typer.Option("--no-color", help="plain text, also on a terminal (as with NO_COLOR set)")]


class _Groups(TyperGroup):
    """The commands of an app, in groups with a heading each in its help."""

    groups: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Writes a section for each group."""
        room = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in self.groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(room)) for name in names])


def make_app(text: str, groups: Mapping[str, Sequence[Command]]) -> typer.Typer:
    """An app with the help `text` and commands in this order, by the heading under which its help lists them."""
    names = {heading: [command.__name__.replace("_", "-") for command in commands]
             for heading, commands in groups.items()}
    kind = type("Commands", (_Groups,), {"groups": names})
    app = typer.Typer(cls=kind, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, help=text,
                      context_settings={"help_option_names": ["-h", "--help"]})

    app.callback()(_global_options)
    for command in chain.from_iterable(groups.values()):
        app.command(cls=_Command)(append(command, [parameter("no_color", NoColor, False)]))
    return app


class _Command(TyperCommand):
    """A command that refuses an empty path or --model, such as "$DIR" of a variable that is not set.

    Otherwise an empty path would be the current directory, and an empty --model the manifest's.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Raises `UsageError`."""
        assert self.callback is not None
        kinds = signature(self.callback).parameters
        typed = self.make_parser(ctx).parse_args(args=list(args))[0] if not ctx.resilient_parsing else {}
        for param in self.get_params(ctx):
            value, model = typed.get(param.name or ""), param.name == "model"
            if (value == "" or (isinstance(value, list | tuple) and "" in value)) and (
                    model or _is_path(kinds[param.name or ""].annotation)):
                name = param.opts[-1] if param.param_type_name == "option" else param.metavar
                raise UsageError(f"{name} is empty, expected a {'model' if model else 'path'}",
                                 hint="name one; a variable of the shell may not be set")
        return super().parse_args(ctx, args)


def _is_path(annotation: Any) -> bool:
    """Whether an option's annotation is that of a path, or of several."""
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return Path in (kind, *get_args(kind))


def _global_options(version: Version = False, no_color: NoColor = False) -> None:
    """Does nothing: --version acts in its callback, --no-color in `console.run`."""


def version_text(name: str) -> str:
    """The versions of this program, Python and its main libraries, read from their metadata without importing them."""
    from importlib.metadata import PackageNotFoundError, version

    def version_of(library: str) -> str:
        try:
            return version(library)
        except PackageNotFoundError:
            return "not installed"

    return "\n".join([f"{name} (Latentry) {version_of('latentry')}", f"Python {sys.version.split()[0]}",
                      *(f"{library} {version_of(library)}" for library in LIBRARIES)])
