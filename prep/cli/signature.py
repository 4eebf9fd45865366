"""Adds options to commands from tables, and options whose choices help lists and shells complete.

Typer reads options from a function's signature, so this module builds signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import typer

Command = Callable[..., None]
Complete = Callable[[str], list[str] | list[tuple[str, str]]]  # text typed so far → words, or words with their meanings


def expand(command: Command, name: str, parameters: Sequence[inspect.Parameter]) -> Command:
    """`command` with `parameters` in place of its parameter `name`, which receives a dict of their values by name."""
    signature = inspect.signature(command, eval_str=True)
    shown = [one for own in signature.parameters.values() for one in (parameters if own.name == name else [own])]

    @wraps(command)
    def expanded(**values: Any) -> None:
        given = {one.name: values.pop(one.name) for one in parameters}
        command(**values, **{name: given})

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
    command.__annotations__ = {one.name: one.annotation for one in shown}
    return command


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A positional-or-keyword parameter for a signature."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


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
