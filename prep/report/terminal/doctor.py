"""Formats the output of `prep doctor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.formatting import counted
from prep.report.terminal.tables import page, records

if TYPE_CHECKING:
    from prep.doctor.check import Check

HEADS = ("", "state", "what was found")


def as_json(groups: Mapping[str, Sequence[Check]]) -> dict[str, Any]:
    """The document of `--json`: checks by group."""
    return {"format": "latentry/doctor", "version": 1, "checks": [
        {"group": group, "name": check.name, "state": check.state, "what": check.what, "hint": check.hint}
        for group, checks in groups.items() for check in checks]}


def as_text(groups: Mapping[str, Sequence[Check]], *, width: int | None) -> str:
    """A table of all checks, and the number of warnings; `width` is the terminal's columns, or None for a pipe."""
    checks = [check for group in groups.values() for check in group]
    rows = [(check.name, check.state, f"{check.what}. Try: {check.hint}" if check.hint else check.what)
            for check in checks]
    warnings = sum(check.state == "warning" for check in checks)
    ending = f"{counted(warnings, 'warning')}" if warnings else "no problems found"
    return page(records(HEADS, rows), ending, width=width)
