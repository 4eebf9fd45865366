"""Checks for settings of training that are not a plain number, switch or word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prep.parse import Unparsed, brief, expect, known_keys, list_of, suggest
from prep.setting import LARGEST, number_of, pair_of


def warmup_check(value: Any, where: str) -> int | float:
    """Checks a number of steps, or a fraction of all: less than 1."""
    if isinstance(value, float) and 0 < value < 1:
        return value
    try:
        return int(number_of(value, int, 0, LARGEST, where))
    except Unparsed as error:
        raise Unparsed(f"{error}, or a fraction of the run below 1, like 0.05") from None


def size_check(value: Any, where: str) -> tuple[Any, ...]:
    """Checks (width, height) in pixels: a latent cell has 8 pixels per side."""
    sides = pair_of(lambda side, at: number_of(side, int, 8, 8192, at), "[width, height] in multiples of 8")
    size: tuple[Any, ...] = sides(value, where)
    if any(side % 8 for side in size):
        raise Unparsed(f"{where} is {list(size)}, expected [width, height] in multiples of 8")
    return size


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


def prompts_check(value: Any, where: str) -> tuple[str, ...]:
    """Checks a list of prompts, at least one; it may be empty itself."""
    texts = list_of(list(value) if isinstance(value, tuple) else value, lambda text, at: expect(text, str, at), where)
    if not texts:
        raise Unparsed(f'{where} is [], expected prompts, of which "" is none')
    return tuple(texts)


def layers_check(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Checks a list of tables: `match`, a suffix or regular expression, and rank, alpha or lr of what it matches."""
    return tuple(list_of(list(value) if isinstance(value, tuple) else value, _rule, where))


def _rule(value: Any, where: str) -> dict[str, Any]:
    table = expect(value, dict, where)
    known_keys(table, ("match", *_OF_RULES), where)
    if "match" not in table or len(table) == 1:
        raise Unparsed(f"{where} is {brief(table)}, expected 'match' and one of: {', '.join(_OF_RULES)}")
    rule: dict[str, Any] = {"match": _pattern(table["match"], f"{where}.match")}
    return rule | {name: number_of(table[name], kind, low, high, f"{where}.{name}")
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


def count_or_auto(value: Any, where: str) -> int | str:
    """Checks for a number, 0 or more, or "auto"."""
    if value == "auto":
        return "auto"
    try:
        return int(number_of(value, int, 0, LARGEST, where))
    except Unparsed as error:
        raise Unparsed(f'{error}, or "auto"') from None


AUTO, IN_HOST = "auto", "offload"  # of gradient_checkpointing, besides true and false


def checkpointing_check(value: Any, where: str) -> bool | str:
    """Checks for true, false, "auto" or "offload"."""
    if isinstance(value, bool) or value in (AUTO, IN_HOST):
        return value if isinstance(value, bool) else str(value)
    raise Unparsed(f'{where} is {brief(value)}, expected true, false, "{AUTO}" or "{IN_HOST}"')


def switch_or_auto(value: Any, where: str) -> bool | str:
    """Checks for true, false or "auto"."""
    if value == "auto" or isinstance(value, bool):
        return "auto" if value == "auto" else bool(value)
    raise Unparsed(f"{where} is {brief(value)}, expected true, false or \"auto\"")
