"""Which findings of a scan are told, and how bad each is: by the command's options, and by a recipe's [scan]."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from prep.arrays import Finding
from prep.findings import CODES
from prep.parse import Unparsed, brief, expect, known_keys, list_of, one_of, suggest
from prep.recipe.schema import ScanChoice

SEVERITIES = ("error", "warning", "info")


def scan_choice(value: Any) -> ScanChoice:
    """What a recipe's [scan] says. Raises `Unparsed`."""
    table = expect(value, dict, "[scan]")
    known_keys(table, ("ignore", "severity"), "[scan]")
    severity = expect(table.get("severity", {}), dict, "scan.severity")
    return ScanChoice(
        ignore=tuple(list_of(table.get("ignore", []), code_of, "scan.ignore")),
        severity=tuple((code_of(code, "scan.severity"), one_of(kind, SEVERITIES, f"scan.severity.{code}"))
                       for code, kind in severity.items()))


def code_of(value: Any, where: str) -> str:
    """`value` when it is the code of a finding. Raises `Unparsed`."""
    code = expect(value, str, where)
    if code not in CODES:
        raise Unparsed(f"{where} has {brief(code)}, expected a finding's code{suggest(code, CODES)}")
    return code


def judged(findings: Iterable[Finding], choice: ScanChoice, *, select: Collection[str] = (),
           ignore: Collection[str] = ()) -> tuple[Finding, ...]:
    """The findings that are told, as severe as `choice` says; `select` (none: all) stands above what it ignores."""
    severity: dict[str, Any] = dict(choice.severity)
    left_out = {*ignore, *(code for code in choice.ignore if code not in select)}
    return tuple(replace(one, severity=severity.get(one.code, one.severity)) for one in findings
                 if one.code not in left_out and (not select or one.code in select))
