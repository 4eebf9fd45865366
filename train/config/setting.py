"""Declares a setting: its default, bounds, one line of help, and whether a resumed run may change it.

`setting(16, low=1, high=4096, help="…")` is the default of a record's field. Checks, `train init`, the reference page
and the rules of `--resume` all read its `Spec` from the field's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prep.parse import Unparsed, brief, expect, known_keys, list_of, one_of, suggest, within

Check = Callable[[Any, str], Any]  # (value, name) → the value to use; raises Unparsed
MOST_TEXT = 2000  # characters of a text
LARGEST = 1 << 40  # upper bound of whole numbers without another bound
MOST = 1e12  # that of other numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """Everything about a setting except its name and default."""

    help: str
    check: Check
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
    made, words = _check_of(sample, low, high, known) if check is None else (check, ", ".join(known))
    return field(default=default, metadata={"spec": Spec(
        help=help, check=made, values=values or words, choices=known, derived=derived, example=example,
        resume=resume)})


def _check_of(sample: Any, low: float | None, high: float | None, choices: tuple[str, ...]) -> tuple[Check, str]:
    """A check for values like `sample`, and a description of the values that it accepts."""
    if choices:
        return (lambda value, where: one_of(value, choices, where)), ", ".join(choices)
    if isinstance(sample, bool):
        return (lambda value, where: expect(value, bool, where)), "true, false"
    least = 0 if low is None else low
    if isinstance(sample, tuple):
        each, words = _check_of(sample[0], low, high, ())
        return _pair(each, words), f"two numbers, {words}"
    kind = float if isinstance(sample, float) else int
    most = high if high is not None else MOST if kind is float else LARGEST
    words = f"{_spell(least)} or more" if high is None else f"{_spell(least)} to {_spell(high)}"
    return (lambda value, where: _number(value, kind, least, most, where)), words


def _number(value: Any, kind: type, low: float, high: float, where: str) -> Any:
    try:
        given: float = expect(value, kind, where)
    except Unparsed as error:
        bounds = f", {_spell(low)} or more" if high in (LARGEST, MOST) else f" from {_spell(low)} to {_spell(high)}"
        raise Unparsed(f"{error}{bounds}") from None
    within(given, low, high, where)
    return given


def _pair(each: Check, words: str) -> Check:
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


def warmup_check(value: Any, where: str) -> int | float:
    """Checks a number of steps, or a fraction of all: less than 1."""
    if isinstance(value, float) and 0 < value < 1:
        return value
    try:
        return int(_number(value, int, 0, LARGEST, where))
    except Unparsed as error:
        raise Unparsed(f"{error}, or a fraction of the run below 1, like 0.05") from None


def size_check(value: Any, where: str) -> tuple[Any, ...]:
    """Checks (width, height) in pixels: a latent cell has 8 pixels per side."""
    whole, _ = _check_of(8, 8, 8192, ())
    size: tuple[Any, ...] = _pair(whole, "[width, height] in multiples of 8")(value, where)
    if any(side % 8 for side in size):
        raise Unparsed(f"{where} is {list(size)}, expected [width, height] in multiples of 8")
    return size


def line_check(value: Any, where: str) -> str:
    """Checks a line of text: metadata of a file, which web pages and terminals show."""
    text = expect(value, str, where)
    if len(text) > MOST_TEXT or not text.isprintable():
        raise Unparsed(f"{where} is {brief(text)}, expected a line of at most {MOST_TEXT} printable characters")
    return text


PRESETS = ("attention", "all-linear", "kohya", "kohya-conv")


def targets_check(value: Any, where: str) -> str | tuple[str, ...]:
    """Checks a preset, or a list of suffixes of layer names and of `re:` regular expressions."""
    if isinstance(value, str):
        if value not in PRESETS:
            raise Unparsed(f"{where} is {brief(value)}, expected one of: {', '.join(PRESETS)}, or a list of layers "
                           f"like ['to_q']{suggest(value, PRESETS)}")
        return value
    names = list_of(list(value) if isinstance(value, tuple) else value, _pattern, where)
    if not names:
        raise Unparsed(f"{where} is [], expected names of layers like 'to_q', or {', '.join(PRESETS)}")
    return tuple(names)


def parts_check(value: Any, where: str) -> tuple[str, ...]:
    """Checks a list of suffixes of module names and of `re:` regular expressions; may be empty."""
    return tuple(list_of(list(value) if isinstance(value, tuple) else value, _pattern, where))


def layers_check(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Checks a list of tables: `match`, a suffix or regular expression, and rank, alpha or lr of what it matches."""
    return tuple(list_of(list(value) if isinstance(value, tuple) else value, _rule, where))


def _rule(value: Any, where: str) -> dict[str, Any]:
    table = expect(value, dict, where)
    known_keys(table, ("match", *_OF_RULES), where)
    if "match" not in table or len(table) == 1:
        raise Unparsed(f"{where} is {brief(table)}, expected 'match' and one of: {', '.join(_OF_RULES)}")
    found: dict[str, Any] = {"match": _pattern(table["match"], f"{where}.match")}
    return found | {name: _number(table[name], kind, low, high, f"{where}.{name}")
                    for name, (kind, low, high) in _OF_RULES.items() if name in table}


_OF_RULES: Mapping[str, tuple[type, float, float]] = {"rank": (int, 1, 4096), "alpha": (float, 1e-6, 1e6),
                                                      "lr": (float, 0, 100)}


def _pattern(value: Any, where: str) -> str:
    """A suffix of layer names, or a regular expression after `re:`."""
    text = expect(value, str, where)
    if not text.removeprefix("re:"):
        raise Unparsed(f"{where} is {brief(text)}, expected the end of a layer's name, or re: and an expression")
    try:
        re.compile(text.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise Unparsed(f"{where} is {brief(text)}, which is no regular expression: {error}") from None
    return text


def switch_or_auto(value: Any, where: str) -> bool | str:
    """Checks for true, false or "auto"."""
    if value == "auto" or isinstance(value, bool):
        return "auto" if value == "auto" else bool(value)
    raise Unparsed(f"{where} is {brief(value)}, expected true, false or \"auto\"")
