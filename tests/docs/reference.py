"""Generates `manifests/reference.md`: commands, options, settings, exit codes, finding codes; from the code."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from prep.errors import EXIT_BUG, EXIT_FINDINGS, EXIT_INTERRUPTED, Problem
from prep.findings import CODES
from prep.training import table

PAGE = "manifests/reference.md"
PROGRAMS = ("prep", "train")
HEAD = """\
# Reference

Every command, option, training setting, exit code and finding code. Generated from the code by `make docs`: edit the
help texts, not this page.

"""
TYPES = {int: "INTEGER", float: "NUMBER", Path: "PATH", str: "TEXT"}


def reference() -> str:
    """The whole page as Markdown."""
    names = [f"{program} {name}" for program in PROGRAMS for name in commands(program)]
    links = " · ".join(f"[`{name}`](#{name.replace(' ', '-')})" for name in names)
    tables = ("training settings", "exit codes", "finding codes")
    links += "".join(f" · [{name}](#{name.replace(' ', '-')})" for name in tables)
    parts = [f"{HEAD}{links}\n"]
    parts += [_command(program, name, command) for program in PROGRAMS for name, command in commands(program).items()]
    return "\n".join([*parts, _settings(), _exit_codes(), _finding_codes()])


def commands(program: str) -> dict[str, Any]:
    """The commands of `prep` or `train`, by name, in the order of `--help`."""
    app = get_command(importlib.import_module(f"{program}.cli.main").app)
    return dict(app.commands)  # type: ignore[attr-defined]


def _command(program: str, name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = " ".join([program, name, *(one.metavar or one.name.upper() for one in arguments), "[OPTIONS]"])
    lines = [f"## {program} {name}\n", f"    {usage}\n", f"{command.help}\n"]
    if arguments:
        lines += [*_table(("argument", "meaning"), ((f"`{one.metavar or one.name.upper()}`", one.help or "")
                                                    for one in arguments)), ""]
    if options:
        lines += [*_table(("option", "meaning"), ((_flags(one), _meaning(one)) for one in options)), ""]
    return "\n".join(lines)


def _flags(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names if option.is_flag else f"{names} `{option.metavar or _type(option)}`"


def _type(option: Any) -> str:
    annotation = option.type_descriptor.annotation
    return TYPES.get(annotation, "TEXT")


def _meaning(option: Any) -> str:
    """The help, with its default; that of --jobs follows the machine."""
    if option.name == "jobs":
        return f"{option.help} (default: one per core that it may use)"
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    plain = isinstance(shown, str | int | float | Path) and not isinstance(shown, bool) and shown != ""
    return f"{option.help} (default: {shown})" if plain and option.show_default else str(option.help)


def _settings() -> str:
    return ("## Training settings\n\nAll settings of `train.toml` (`train init` writes one). A resumed run may change "
            f"those marked so.\n\n{_settings_table()}")


def _settings_table() -> str:
    """The table of training settings."""
    lines = ["| setting | default | values | meaning | resume |", "|---|---|---|---|---|"]
    for row in table.rows():
        default = row.spec.derived or f"`{table.spell(row.value)}`"
        free = "may change" if row.spec.resume else ""
        lines.append(f"| `{row.name}` | {default} | {row.spec.values} | {row.spec.help} | {free} |")
    return "\n".join(lines) + "\n"


def _exit_codes() -> str:
    rows = [(0, "done"), (EXIT_FINDINGS, "done, with findings (`prep scan`), except for files that could not be "
             "read now (`prep encode`, `prep mask`), or with differences (`prep diff --exit-code`)"),
            *((kind.exit_code, _sentence(kind)) for kind in Problem.__subclasses__()),
            (EXIT_BUG, "A bug in Latentry: please report it."),
            (EXIT_INTERRUPTED, "Interrupted; finished work is kept, and the same command continues.")]
    return "\n".join(["## Exit codes\n", *_table(("code", "meaning"), ((str(code), text) for code, text in rows)), ""])


def _sentence(kind: type[Problem]) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def _finding_codes() -> str:
    rows = ((f"`{code}`", severity, meaning, action) for code, (severity, meaning, action) in CODES.items())
    return "\n".join(["## Finding codes\n", *_table(("code", "severity", "meaning", "what to do"), rows), ""])


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield _row(head)
    yield "|" + "---|" * len(head)
    yield from map(_row, rows)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
