"""The table of all settings; writes the commented train.toml from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from prep.setting import Row, rows_of
from prep.training.schema import Config

_COLUMN = 40  # where comments begin
FIRST = ("method", "steps", "batch_size", "optimizer.lr", "lora.rank", "quantization", "gradient_checkpointing",
         "offload", "validation.every", "sample.every", "checkpoint.every")  # what people change
_HEAD = """\
# Settings of a training run: train run MANIFEST reads them from train.toml beside the manifest or in the current
# directory, or from -c FILE. A resumed run may change settings marked (r). These are what people change:
"""
_REST = """\

# ----------------------------------------------------------------------------------------------------------------
# Every other setting with its default; defaults of commented lines depend on another setting or the data.
"""


def _sections() -> dict[str, Any]:
    return {field.name: field.default_factory for field in fields(Config) if is_dataclass(field.default_factory)}


SECTIONS: Mapping[str, Any] = _sections()  # name of a TOML table → its record


def rows() -> Iterator[Row]:
    """Every setting, in the order of the file."""
    yield from rows_of(Config)
    for section, record in SECTIONS.items():
        yield from rows_of(record, section)


SETTINGS: Mapping[str, Row] = {row.name: row for row in rows()}


def as_toml(chosen: Mapping[str, Any] | None = None) -> str:
    """The commented train.toml with every default, or the `chosen` value: what `train init` writes."""
    values = chosen or {}
    lines, section = [_HEAD, *(_line(SETTINGS[name], values) for name in FIRST), _REST], ""
    for row in (row for row in SETTINGS.values() if row.name not in FIRST):
        head = row.name.rpartition(".")[0]
        if head != section:
            lines += ["", f"# {head}: {SECTIONS[head].__doc__.splitlines()[0]}"]
            section = head
        lines.append(_line(row, values))
    return "\n".join(lines) + "\n"


def _line(row: Row, values: Mapping[str, Any]) -> str:
    line = f"{'# ' if row.spec.derived and row.name not in values else ''}{row.name} = " + spell(
        values.get(row.name, row.value))
    return f"{line:<{_COLUMN - 1}} # {row.meaning}{' (r)' if row.spec.resume else ''}"


def spell(value: Any) -> str:
    """`value` in TOML syntax."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, float):
        return repr(value).replace("e-0", "e-")
    return json.dumps(value)
