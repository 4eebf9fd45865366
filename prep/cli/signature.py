"""Adds options to commands from tables, and options whose choices help lists and shells complete.

Typer reads options from a function's signature, so this module builds signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from math import ceil
from typing import Annotated, Any

import typer

from prep.setting import LARGEST, MOST, Row, rows_of

Command = Callable[..., None]
Complete = Callable[[str], list[str] | list[tuple[str, str]]]  # text typed so far → words, or words with their meanings


def expand(command: Command, name: str, parameters: Sequence[inspect.Parameter],
           made: Callable[[dict[str, Any]], Any] = lambda values: values) -> Command:
    """`command` with `parameters` in place of its parameter `name`, which receives what is `made` of a dict of their
    values by name."""
    signature = inspect.signature(command, eval_str=True)
    shown = [item for own in signature.parameters.values() for item in (parameters if own.name == name else [own])]

    @wraps(command)
    def expanded(**values: Any) -> None:
        chosen = {item.name: values.pop(item.name) for item in parameters}
        command(**values, **{name: made(chosen)})

    return _with_parameters(expanded, signature, shown)


def append(command: Command, parameters: Sequence[inspect.Parameter]) -> Command:
    """`command` with `parameters` added at the end; it does not receive their values unless it has such parameters."""
    signature = inspect.signature(command, eval_str=True)

    @wraps(command)
    def appended(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if name in signature.parameters})

    return _with_parameters(appended, signature, [*signature.parameters.values(), *parameters])


def _with_parameters(command: Command, signature: inspect.Signature, shown: list[inspect.Parameter]) -> Command:
    command.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in shown}
    return command


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A positional-or-keyword parameter for a signature."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def with_options(name: str, record: Any, only: Collection[str] = ()) -> Callable[[Command], Command]:
    """A decorator that replaces a command's parameter `name`, a `record` of settings, by an option for each of them, or
    for those in `only`; the others have their defaults."""
    rows = {row.field: row for row in rows_of(record) if not only or row.field in only}
    parameters = [parameter(row.field, Annotated[kind_of(row), option_of(row)], _shown(row)) for row in rows.values()]
    return lambda command: expand(command, name, parameters, lambda values: record(**{
        field: _value(rows[field], value) for field, value in values.items()}))


def option_of(row: Row, *flags: str, help: str = "") -> Any:  # noqa: A002
    """The option of a setting, with its bounds or choices, and its help unless there is another."""
    spec, known, text = row.spec, flags or (row.spec.flag,), help or row.spec.meaning
    if spec.choices:
        return choice(*known, help=text, words=spec.choices, other=spec.other)
    low, high = (None, None) if spec.bounds is None else (
        None if bound in (LARGEST, MOST) else bound / spec.unit if spec.unit else bound for bound in spec.bounds)
    if kind_of(row) in (int, int | None) and low is not None:
        low, high = ceil(low), None if high is None else int(high)
    return typer.Option(*known, help=text, min=low, max=high)


def kind_of(row: Row) -> Any:
    """The type of a setting's option."""
    kind = type(row.spec.unit) if row.spec.unit else type(row.value)
    return kind | None if row.default is None else kind


def _shown(row: Row) -> Any:
    return row.default if row.default is None or not row.spec.unit else type(row.spec.unit)(row.default / row.spec.unit)


def _value(row: Row, option_value: Any) -> Any:
    """The value of a setting from that of its option."""
    return option_value if option_value is None or not row.spec.unit else type(row.value)(option_value * row.spec.unit)


def choice(*flags: str, help: str, words: Iterable[str], other: str = "") -> Any:  # noqa: A002
    """An option whose `words` (and `other`, a placeholder for further values) help lists and shells complete.

    The code that uses a value checks it, so that a wrong value gets the same message here as in a recipe.
    """
    known = tuple(words)
    shown = "|".join((*known, other) if other else known)
    return typer.Option(*flags, help=help, metavar=f"[{shown}]", autocompletion=complete(known))


def complete(words: Iterable[str] | Mapping[str, str]) -> Complete:
    """A completion of the text typed so far to matching `words`; a mapping also gives their meanings."""
    def completed(incomplete: str) -> Any:
        fit = [word for word in words if word.startswith(incomplete)]
        return [(word, words[word]) for word in fit] if isinstance(words, Mapping) else fit

    return completed
