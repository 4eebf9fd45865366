"""Formats the output of `prep codes`."""

from __future__ import annotations

from collections.abc import Mapping

from prep.findings import CODES
from prep.report.terminal.tables import page, records


def codes_table(codes: Mapping[str, tuple[str, str, str]], *, width: int | None = None) -> str:
    """A table of codes: severity, code, meaning, what to do."""
    rows = [(severity, code, meaning, remedy) for code, (severity, meaning, remedy) in codes.items()]
    return page(records(("", "code", "meaning", "what to do"), rows), width=width)


def code_text(code: str) -> str:
    """The severity, meaning and remedy of one code."""
    severity, meaning, remedy = CODES[code]
    return f"{severity} {code}: {meaning}\nwhat to do: {remedy}"
