"""Commands as forms for `prep studio`, made of their own declarations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from typer.main import get_command

from prep.jobs.job import PROGRAMS
from prep.studio.forms import Field, Form, Kind
from prep.studio.steps import STEPS

LEFT_OUT = {"quiet", "as_json", "no_color", "list_all", "open_browser", "port"}  # a job's log is read by people


def forms_of(program: str, commands: Sequence[str]) -> list[Form]:
    """The forms of a program's commands. Those of `train` are found by name: `prep` imports nothing of it."""
    group: Any = get_command(import_module(PROGRAMS[program]).app)
    return [Form(program=program, command=name, help=group.commands[name].help.split("\n\n")[0].replace("\n", " "),
                 fields=tuple(_fields(group.commands[name]))) for name in commands]


def step_forms() -> list[Form]:
    """The forms of the steps of `prep studio`."""
    return [form for program in PROGRAMS
            for form in forms_of(program, [step.command for step in STEPS if step.program == program])]


def _fields(command: Any) -> Iterator[Field]:
    for param in command.params:
        if param.name in LEFT_OUT or param.hidden:
            continue
        argument = param.param_type_name == "argument"
        choices = tuple(param.metavar[1:-1].split("|")) if (
            not argument and param.metavar and param.metavar.startswith("[") and "|" in param.metavar) else ()
        kind_of_value = param.type_descriptor.annotation
        kind: Kind = ("flag" if getattr(param, "is_flag", False) else "choice" if choices else "several"
                      if param.multiple or param.nargs == -1 else "number" if kind_of_value in (int, float) else "text")
        yield Field(
            name=param.name, flag="" if argument else max(param.opts, key=len), help=param.help or "", kind=kind,
            choices=choices, low=_bound(param, "min"), high=_bound(param, "max"), whole=kind_of_value is int,
            default=_typed(param.default), required=param.required, off=next(iter(param.secondary_opts), ""))


def _bound(param: Any, name: str) -> float | None:
    value = getattr(param, name, None)
    return None if value is None else float(value)


def _typed(default: Any) -> str:
    """A default as it is typed; "" for those that are no text or number."""
    return str(default) if isinstance(default, str | int | float | Path) and not isinstance(default, bool) else ""
