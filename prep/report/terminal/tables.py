"""Formats reports: aligned tables for a terminal, tab-separated lines for a pipe.

On a terminal, only a last column of text wraps between words; other columns do not, so that a path can be copied. In a
pipe nothing wraps, and records (findings, damaged rows) are one line each with tabs between the columns. Names and
captions come from files, so their control characters are spelled out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from prep.formatting import printable

GAP = "  "
NARROW = 24  # minimum columns of a wrapped cell; with fewer left, it goes below its row
INDENT = 4  # of a cell below its row


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable:
    """Rows of text under column heads."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()  # right-aligned columns
    lines: bool = False  # in a pipe: one tab-separated line per row, without heads


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> TextTable:
    """A table of aligned columns."""
    return TextTable(heads=tuple(heads), rows=_cells(rows), right=frozenset(right))


def records(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> TextTable:
    """A table that becomes tab-separated lines in a pipe."""
    return TextTable(heads=tuple(heads), rows=_cells(rows), right=frozenset(right), lines=True)


def _cells(rows: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(printable(cell) for cell in row) for row in rows)


def page(*parts: TextTable | str, width: int | None = None) -> str:
    """The parts as text, with a blank line after each table; `width` is the terminal's columns, or None for a pipe."""
    blocks = []
    for part in parts:
        if isinstance(part, str):
            blocks.append(printable(part))
        elif part.rows:
            blocks.append("\n".join(_spelled(part, width)) + ("" if part.lines and width is None else "\n"))
    return "\n".join(blocks).rstrip("\n")


def _spelled(of: TextTable, width: int | None) -> list[str]:
    if of.lines and width is None:
        return ["\t".join(row) for row in of.rows]
    rows = [of.heads, *of.rows] if any(of.heads) else [*of.rows]
    *wide, last = (max(cell_len(row[column]) for row in rows) for column in range(len(of.heads)))
    before = sum(wide) + len(GAP) * len(wide)
    if width is None or before + last <= width or len(wide) in of.right:
        return [_line(row, [*wide, last], of.right) for row in rows]
    lines = []
    for row in rows:
        head = _line(row[:-1], wide, of.right, end=True)
        if width - before < NARROW:
            below = [] if row is of.heads else _folded(row[-1], width - INDENT, " " * INDENT)
            lines += [head.rstrip(), *below]
        else:
            first, *more = _folded(row[-1], width - before, "") or [""]
            lines += [(head + first).rstrip(), *(" " * before + piece for piece in more)]
    return lines


def _line(cells: Sequence[str], widths: Sequence[int], right: frozenset[int], *, end: bool = False) -> str:
    aligned = [" " * (wide - cell_len(cell)) + cell if number in right else cell + " " * (wide - cell_len(cell))
               for number, (cell, wide) in enumerate(zip(cells, widths, strict=True))]
    return GAP.join(aligned) + GAP if end else GAP.join(aligned).rstrip()


def _folded(text: str, width: int, indent: str) -> list[str]:
    """`text` wrapped to `width` columns; a longer word stays whole."""
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return [indent + line for line in lines]
