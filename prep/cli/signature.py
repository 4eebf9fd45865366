"""Commands get options that are not written in their own signatures, and choices that help shows and shells complete.

Typer reads options from a function's signature: here one is made from tables.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import typer

Command = Callable[..., None]
Complete = Callable[[str], list[str] | list[tuple[str, str]]]  # what is typed so far to words, or words with a meaning


def expand(command: Command, name: str, parameters: Sequence[inspect.Parameter]) -> Command:
    """`command` with `parameters` in place of its parameter `name`, which is given their values by name."""
    signature = inspect.signature(command, eval_str=True)
    shown = [one for own in signature.parameters.values() for one in (parameters if own.name == name else [own])]

    @wraps(command)
    def expanded(**values: Any) -> None:
        given = {one.name: values.pop(one.name) for one in parameters}
        command(**values, **{name: given})

    return _with_parameters(expanded, signature, shown)


def append(command: Command, parameters: Sequence[inspect.Parameter]) -> Command:
    """`command` with `parameters` at the end, of which it is told nothing."""
    signature = inspect.signature(command, eval_str=True)

    @wraps(command)
    def appended(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if name in signature.parameters})

    return _with_parameters(appended, signature, [*signature.parameters.values(), *parameters])


def _with_parameters(command: Command, signature: inspect.Signature, shown: list[inspect.Parameter]) -> Command:
    command.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in shown}
    return command


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter for a signature."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def choice(*flags: str, help: str, words: Iterable[str], other: str = "") -> Any:  # noqa: A002
    """An option of which help shows the `words` (and `other`, what else it may be), and shells complete them.

    Values are checked where they are used, so that each wrong one gets the same message in a recipe and here.
    """
    known = tuple(words)
    shown = "|".join((*known, other) if other else known)
    return typer.Option(*flags, help=help, metavar=f"[{shown}]", autocompletion=complete(known))


def complete(words: Iterable[str] | Mapping[str, str]) -> Complete:
    """Completes to those of `words` that begin like what is typed; of a mapping, with their meanings."""
    def completed(incomplete: str) -> Any:
        fit = [word for word in words if word.startswith(incomplete)]
        return [(word, words[word]) for word in fit] if isinstance(words, Mapping) else fit

    return completed
