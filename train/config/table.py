"""The table of all settings; writes the commented train.toml from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any

from train.config.schema import Config
from train.config.setting import Spec

_COLUMN = 32  # where comments begin
_HEAD = """\
# Settings of a training run: train run MANIFEST -c train.toml. Every setting is here with its default;
# defaults of commented lines depend on another setting or the data. A resumed run may change settings marked (r).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One setting."""

    name: str  # including its section: lora.rank
    default: Any
    spec: Spec

    @property
    def value(self) -> Any:
        """The default, or the example if the default is None."""
        return self.spec.example if self.default is None else self.default

    @property
    def told(self) -> str:
        """The setting's comment in train.toml."""
        choices, derived = " | ".join(self.spec.choices), self.spec.derived
        return (f"{choices}: " if choices else "") + self.spec.help + (f" (default: {derived})" if derived else "")


def _sections() -> dict[str, Any]:
    return {one.name: one.default_factory for one in fields(Config) if is_dataclass(one.default_factory)}


SECTIONS: Mapping[str, Any] = _sections()  # name of a TOML table → its record


def rows() -> Iterator[Row]:
    """Every setting, in the order of the file."""
    for one in fields(Config):
        if one.name not in SECTIONS:
            yield _row("", one)
    for section, record in SECTIONS.items():
        for one in fields(record):
            yield _row(f"{section}.", one)


def _row(prefix: str, one: Field[Any]) -> Row:
    return Row(name=prefix + one.name, default=one.default, spec=one.metadata["spec"])


SETTINGS: Mapping[str, Row] = {row.name: row for row in rows()}


def as_toml() -> str:
    """The commented train.toml with every default: what `train init` writes."""
    lines, section = [_HEAD], ""
    for row in rows():
        head, _, key = row.name.rpartition(".")
        if head != section:
            lines += ["", f"[{head}]", f"# {SECTIONS[head].__doc__.splitlines()[0]}"]
            section = head
        line = f"{'# ' if row.spec.derived else ''}{key} = {spell(row.value)}"
        lines.append(f"{line:<{_COLUMN - 1}} # {row.told}{' (r)' if row.spec.resume else ''}")
    return "\n".join(lines) + "\n"


def spell(value: Any) -> str:
    """`value` in TOML syntax."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, float):
        return repr(value).replace("e-0", "e-")
    return json.dumps(value)
