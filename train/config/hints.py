"""What to write instead of a setting or a value that is refused: the ends of errors' hints."""

from __future__ import annotations

import re
import shlex
from typing import Any

from prep.parse import Unparsed, closest
from prep.setting import Row
from prep.training.interval import interval_check
from prep.training.table import SECTIONS, SETTINGS, spell
from train.config.aliases import advice, meant

_SWITCHES = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}
MANY = "train init writes a file with every setting"


def nearest(word: str) -> str:
    """The setting that `word` is for, by a name of another trainer or mistyped; empty if none or several are like it.
    """
    named, plain = meant(word, SETTINGS), re.sub(r"[./:\s]+", ".", word.strip().lower()).replace("-", "_")
    if len(named) == 1:
        return named[0]
    if named or advice(word, SETTINGS):
        return closest(plain, named)
    ends: dict[str, str] = {}
    for name in SETTINGS:
        ends.setdefault(name.rpartition(".")[2], name)
    return closest(plain, SETTINGS) or ends.get(closest(plain.rpartition(".")[2], ends), "")


def of_name(word: str, value: Any) -> str:
    """What to write instead of `--set word=value`, whose name is unknown or that of a section."""
    name = _first(word) if word in SECTIONS else nearest(word)
    return f"{_as_option(name, _usable(name, value))}; {MANY}" if name else MANY


def of_value(name: str, value: Any, *, option: bool) -> str:
    """A value that can be written instead of `value`, which is refused: as an option, or in the file."""
    usable = _usable(name, value)
    if usable in (None, "", ()):
        return MANY
    section, _, key = name.rpartition(".")
    shown = _as_option(name, usable) if option else f"{key} = {spell(usable)}{f' in [{section}]' if section else ''}"
    return f"for example: {shown}; {MANY}"


def of_text(text: str) -> str:
    """What to write instead of `--set text`, which has no value."""
    word = re.split(r"[:\s]", text.strip(), maxsplit=1)[0]
    name = _first(word) if word in SECTIONS else nearest(word)
    return f"for example: {_as_option(name, SETTINGS[name].value) if name else '--set lora.rank=8'}"


def _first(section: str) -> str:
    return next(name for name in SETTINGS if name.startswith(f"{section}."))


def _as_option(name: str, value: Any) -> str:
    spelled = value if isinstance(value, str) and value else spell(value)
    return f"--set {shlex.quote(f'{name}={spelled}')}"


def _usable(name: str, value: Any) -> Any:
    """`value` as it was probably meant, if the setting takes that; else the default."""
    row = SETTINGS[name]
    return next((each for each in (value, *_readings(value, row)) if _taken(row, each)), row.value)


def _readings(value: Any, row: Row) -> list[Any]:
    """What `value` may have been meant as, the likeliest first."""
    text, usual = str(value).strip(), row.value
    if isinstance(usual, bool) or "true" in row.spec.choices:
        return [_SWITCHES.get(text.lower())]
    if row.spec.check is interval_check:
        return _intervals(value, text)
    if isinstance(usual, (int, float)):
        return [_number(text.replace(",", "" if isinstance(usual, int) else "."))]  # 1,000 steps; a rate of 0,001
    if usual and isinstance(usual, tuple):
        numbers = [_number(word) for word in re.findall(r"[0-9.]+(?:[eE][+-]?[0-9]+)?", text)]
        return [tuple(numbers), tuple(numbers * 2) if isinstance(usual[0], int) else None]
    return [closest(text, row.spec.choices), tuple(re.findall(r"[\w.-]+", text)), text]  # those are names of layers


def _intervals(value: Any, text: str) -> list[Any]:
    """What an interval may have been meant as: a number of steps, or by other texts and fractions, of epochs."""
    steps, number = _number(text.replace(",", "")), re.search(r"[0-9]*\.?[0-9]+", text)
    epochs = float(number[0]) if number and ("epoch" in text.lower() or isinstance(value, float)) else 1
    return [steps, f"{epochs:g} epoch{'' if epochs == 1 else 's'}" if isinstance(value, str | float) else None]


def _number(text: str) -> int | float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


def _taken(row: Row, value: Any) -> bool:
    try:
        row.spec.check(value, row.name)
    except Unparsed:
        return False
    return True
