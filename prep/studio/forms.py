"""A command as a form: its arguments and options, with help and bounds, and the words that filled fields make.

Forms are made of the commands' own declarations (`prep/cli/forms.py`), so a page offers what the command line does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prep.errors import UsageError
from prep.parse import brief

Kind = Literal["text", "number", "flag", "choice", "several"]
LONGEST = 4096  # characters of a value
MOST = 100  # values of a field that takes several


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """An argument or option of a command."""

    name: str
    flag: str  # "": an argument, which has none
    help: str
    kind: Kind = "text"
    choices: tuple[str, ...] = ()  # of a choice; words in capitals stand for any other value
    low: float | None = None
    high: float | None = None
    whole: bool = False  # whether a number is whole
    default: str = ""  # as it is typed
    required: bool = False
    off: str = ""  # the flag that says no

    @property
    def label(self) -> str:
        """Its name on the page."""
        return (self.flag or self.name).removeprefix("--").replace("-", " ").replace("_", " ")

    @property
    def is_open(self) -> bool:
        """Whether other values than its choices are allowed."""
        return any(word != word.lower() for word in self.choices)

    @property
    def words(self) -> tuple[str, ...]:
        """Its choices that are words themselves."""
        return tuple(word for word in self.choices if word == word.lower())


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A command of `prep` or `train`."""

    program: str
    command: str
    help: str
    fields: tuple[Field, ...]

    @property
    def name(self) -> str:
        """Its name in addresses."""
        return f"{self.program}-{self.command}"

    def words(self, values: Mapping[str, Sequence[str]]) -> list[str]:
        """The command with these values, by field: arguments come first, unless one looks like an option; what is
        empty or the default is left out. Raises `UsageError` for a value that is out of bounds, or no field's."""
        unknown = sorted(values.keys() - {field.name for field in self.fields})
        if unknown:
            raise UsageError(f"{self.program} {self.command} has no field {unknown[0][:100]}",
                             hint="load the page again")
        places, options = list[str](), list[str]()
        for field in self.fields:
            given = [value for value in values.get(field.name, ()) if value != ""]
            _check(field, given)
            if not field.flag:
                places += given
            elif field.kind == "flag":
                said = given[-1] if given else ""
                options += [field.flag] if said == "yes" else [field.off] if said == "no" and field.off else []
            else:
                options += [word for value in given if value != field.default for word in _option(field.flag, value)]
        if any(place.startswith("-") for place in places):
            return [self.program, self.command, *options, "--", *places]
        return [self.program, self.command, *places, *options]

    def missing(self, values: Mapping[str, Sequence[str]]) -> list[str]:
        """The labels of fields that have to be filled, and are not."""
        return [field.label for field in self.fields if field.required and not any(values.get(field.name, ()))]


def complete(form: Form, given: Mapping[str, Sequence[str]]) -> list[str]:
    """The words of a filled form. Raises `UsageError` for one that lacks something."""
    missing = form.missing(given)
    if missing:
        raise UsageError(f"still to be filled: {', '.join(missing)}")
    return form.words(given)


def _option(flag: str, value: str) -> list[str]:
    return [f"{flag}={value}"] if value.startswith("-") and flag.startswith("--") else [flag, value]


def _check(field: Field, given: Sequence[str]) -> None:
    if len(given) > (MOST if field.kind == "several" else 1):
        raise UsageError(f"{field.label} is given {len(given)} times", hint="load the page again")
    for value in given:
        if len(value) > LONGEST or "\0" in value or not value.isprintable():
            raise UsageError(f"{field.label} is {brief(value)}, expected a line of at most {LONGEST} printable "
                             "characters")
        if field.kind == "number":
            _check_number(field, value)
        elif field.kind == "choice" and value not in field.words and not field.is_open:
            raise UsageError(f"{field.label} is {brief(value)}, expected one of {', '.join(field.words)}")


def _check_number(field: Field, value: str) -> None:
    try:
        number = int(value) if field.whole else float(value)
    except ValueError:
        kind = "whole number" if field.whole else "number"
        raise UsageError(f"{field.label} is {brief(value)}, expected a {kind}") from None
    if not (field.low is None or number >= field.low) or not (field.high is None or number <= field.high):
        raise UsageError(f"{field.label} is {value}, expected {bounds_of(field)}")


def bounds_of(field: Field) -> str:
    """The bounds of a number in words; "" if it has none."""
    words = ([] if field.low is None else [f"{field.low:g} or more"]) + (
        [] if field.high is None else [f"{field.high:g} or less"])
    return ", ".join(words)
