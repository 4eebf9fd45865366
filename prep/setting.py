"""Declares a setting of dataset.toml, train.toml or a command: its default, bounds and one line of help.

`setting(16, low=1, high=4096, help="…")` is the default of a record's field. Whatever reads, writes, checks, documents
or converts the setting takes its `Spec` from the field's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, dataclass, field, fields
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
    name: str  # in TOML, if that is not the field's: mask.from
    other: str  # what else than its choices it accepts, as help shows it: NUMBER
    flag: str  # of a command: --shard-mib; "": it has none, or one that stands with the command
    unit: float  # the option's number times this is the value; its type is that of the option's number

    @property
    def meaning(self) -> str:
        """What it is for, and what its default is if that is not fixed."""
        return self.help + (f" (default: {self.derived})" if self.derived else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One setting of a record."""

    field: str
    name: str  # in TOML, including its section: lora.rank
    default: Any
    spec: Spec

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest value of a number; its default may lie outside."""
        assert self.spec.bounds is not None, f"{self.name} is no number"
        return self.spec.bounds

    @property
    def value(self) -> Any:
        """The default, or the example if the default is None."""
        return self.spec.example if self.default is None else self.default

    @property
    def meaning(self) -> str:
        """Its comment in a file: its choices, what it is for, its default."""
        choices = " | ".join((*self.spec.choices, self.spec.other) if self.spec.other else self.spec.choices)
        return (f"{choices}: " if choices else "") + self.spec.meaning


def rows_of(record: Any, section: str = "") -> Iterator[Row]:
    """The settings among a record's fields, in their order."""
    for declared in fields(record):
        if "spec" in declared.metadata:
            yield _row(declared, f"{section}." if section else "")


def check_values(record: Any) -> None:
    """Raises `Unparsed` for the first value of a record that its setting does not accept."""
    for row in rows_of(record):
        value = getattr(record, row.field)
        if value is not None or row.default is not None:
            row.spec.check(value, row.name)


def _row(declared: Field[Any], prefix: str) -> Row:
    spec: Spec = declared.metadata["spec"]
    return Row(field=declared.name, name=spec.name or prefix + declared.name, default=declared.default, spec=spec)


def setting(default: Any, *, help: str, low: float | None = None, high: float | None = None,  # noqa: A002
            choices: Iterable[str] = (), check: Check | None = None, values: str = "", derived: str = "",
            example: Any = None, resume: bool = False, name: str = "", other: str = "", flag: str = "",
            unit: float = 0) -> Any:
    """A field of a settings record. Without `check`, derives one from the bounds and the default's (or example's) type;
    it accepts the default, even outside of the bounds or the choices.

    With a `check`, or with `other` values, `choices` only document the allowed ones.
    """
    sample = default if default is not None else example
    known = tuple(choices)
    bounds = _bounds_of(sample, low, high) if check is None and not known else None
    made, words = _check_of(sample, bounds, known, other) if check is None else (check, ", ".join(known))
    if check is None and isinstance(default, int | str) and not _is_fine(made, default):
        made, words = _or_default(made, default), f"{words}, or {default}" if default else words
    return field(default=default, metadata={"spec": Spec(
        help=help, check=made, bounds=bounds, values=values or words, choices=known, derived=derived, example=example,
        resume=resume, name=name, other=other, flag=flag, unit=unit)})


def _bounds_of(sample: Any, low: float | None, high: float | None) -> tuple[float, float] | None:
    first = sample[0] if isinstance(sample, tuple) and sample else sample
    if not isinstance(first, int | float) or isinstance(first, bool):
        return None
    return low or 0, high if high is not None else MOST if isinstance(first, float) else LARGEST


def _check_of(sample: Any, bounds: tuple[float, float] | None, choices: tuple[str, ...], other: str = ""
              ) -> tuple[Check, str]:
    """A check for values like `sample`, and a description of the values that it accepts."""
    if choices and not other:
        return (lambda value, where: one_of(value, choices, where)), ", ".join(choices)
    if isinstance(sample, str):
        return (lambda value, where: expect(value, str, where)), "a text"
    if sample == ():
        return texts_check, "a list of texts"
    if bounds is None:
        return (lambda value, where: expect(value, bool, where)), "true, false"
    if isinstance(sample, tuple):
        each, words = _check_of(sample[0], bounds, ())
        return pair_of(each, words), f"two numbers, {words}"
    kind, (low, high) = float if isinstance(sample, float) else int, bounds
    words = f"{_spell(low)} or more" if high in (LARGEST, MOST) else f"{_spell(low)} to {_spell(high)}"
    return (lambda value, where: number_of(value, kind, low, high, where)), words


def _is_fine(check: Check, value: Any) -> bool:
    try:
        check(value, "")
    except Unparsed:
        return False
    return True


def _or_default(check: Check, default: Any) -> Check:
    return lambda value, where: value if type(value) is type(default) and value == default else check(value, where)


def texts_check(value: Any, where: str) -> tuple[str, ...]:
    """Checks a list of texts."""
    return tuple(list_of(list(value) if isinstance(value, tuple) else value, lambda text, at: expect(text, str, at),
                         where))


def number_of(value: Any, kind: type, low: float, high: float, where: str) -> Any:
    """`value`, if it is a `kind` (int or float) from `low` to `high`. Raises `Unparsed`."""
    try:
        number: float = expect(value, kind, where)
    except Unparsed as error:
        bounds = f", {_spell(low)} or more" if high in (LARGEST, MOST) else f" from {_spell(low)} to {_spell(high)}"
        raise Unparsed(f"{error}{bounds}") from None
    within(number, low, high, where)
    return number


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
