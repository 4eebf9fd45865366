"""Declares a setting: its default, bounds, one line of help, and whether a resumed run may change it.

`setting(16, low=1, high=4096, help="…")` is the default of a record's field. Checks, `train init`, the reference page
and the rules of `--resume` all read its `Spec` from the field's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from prep.parse import Unparsed, brief, expect, list_of, one_of, within

Check = Callable[[Any, str], Any]  # (value, name) → the value to use; raises Unparsed
MOST_TEXT = 2000  # characters of a text
LARGEST = 1 << 40  # upper bound of whole numbers without another bound
MOST = 1e12  # that of other numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """Everything about a setting except its name and default."""

    help: str
    check: Check
    bounds: tuple[float, float] | None  # of a number, or of each of two; None for other values
    values: str  # allowed values, in words
    choices: tuple[str, ...]  # the allowed words, if the value is one of a fixed set
    derived: str  # what the default derives from, if it is not fixed: train.toml then has the setting commented out
    example: Any  # the value to show if the default is None
    resume: bool  # whether a resumed run may change it


def setting(default: Any, *, help: str, low: float | None = None, high: float | None = None,  # noqa: A002
            choices: Iterable[str] = (), check: Check | None = None, values: str = "", derived: str = "",
            example: Any = None, resume: bool = False) -> Any:
    """A field of a settings record. Without `check`, derives one from the bounds and the default's (or example's) type.

    With a `check`, `choices` only document the allowed values.
    """
    sample = default if default is not None else example
    known = tuple(choices)
    bounds = _bounds_of(sample, low, high) if check is None and not known else None
    made, words = _check_of(sample, bounds, known) if check is None else (check, ", ".join(known))
    return field(default=default, metadata={"spec": Spec(
        help=help, check=made, bounds=bounds, values=values or words, choices=known, derived=derived, example=example,
        resume=resume)})


def _bounds_of(sample: Any, low: float | None, high: float | None) -> tuple[float, float] | None:
    first = sample[0] if isinstance(sample, tuple) else sample
    if isinstance(first, bool):
        return None
    return low or 0, high if high is not None else MOST if isinstance(first, float) else LARGEST


def _check_of(sample: Any, bounds: tuple[float, float] | None, choices: tuple[str, ...]) -> tuple[Check, str]:
    """A check for values like `sample`, and a description of the values that it accepts."""
    if choices:
        return (lambda value, where: one_of(value, choices, where)), ", ".join(choices)
    if bounds is None:
        return (lambda value, where: expect(value, bool, where)), "true, false"
    if isinstance(sample, tuple):
        each, words = _check_of(sample[0], bounds, ())
        return pair_of(each, words), f"two numbers, {words}"
    kind, (low, high) = float if isinstance(sample, float) else int, bounds
    words = f"{_spell(low)} or more" if high in (LARGEST, MOST) else f"{_spell(low)} to {_spell(high)}"
    return (lambda value, where: number_of(value, kind, low, high, where)), words


def number_of(value: Any, kind: type, low: float, high: float, where: str) -> Any:
    """`value`, if it is a `kind` (int or float) from `low` to `high`. Raises `Unparsed`."""
    try:
        given: float = expect(value, kind, where)
    except Unparsed as error:
        bounds = f", {_spell(low)} or more" if high in (LARGEST, MOST) else f" from {_spell(low)} to {_spell(high)}"
        raise Unparsed(f"{error}{bounds}") from None
    within(given, low, high, where)
    return given


def pair_of(each: Check, words: str) -> Check:
    """A check for two values, in a list or tuple, that `words` describe."""
    def check(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise Unparsed(f"{where} is {brief(value)}, expected a list of two numbers, {words}")
        pair = list_of(list(value), each, where)
        if len(pair) != 2:
            raise Unparsed(f"{where} has {len(pair)} values, expected 2")
        return tuple(pair)

    return check


def _spell(bound: float) -> str:
    return "2^63 - 1" if bound == (1 << 63) - 1 else f"{bound:.10g}"


def line_check(value: Any, where: str) -> str:
    """Checks a line of text: metadata of a file, which web pages and terminals show."""
    text = expect(value, str, where)
    if len(text) > MOST_TEXT or not text.isprintable():
        raise Unparsed(f"{where} is {brief(text)}, expected a line of at most {MOST_TEXT} printable characters")
    return text
