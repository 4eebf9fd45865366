"""Formats the output of `prep scan`, and findings for other commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prep.findings import CODES, SEVERITIES, Finding, first_of_each
from prep.formatting import counted, grouped, shell_name
from prep.report.terminal.tables import TextTable, page, records, table

SCREEN = 20  # findings; for more, a terminal gets counts by code
ERRORS = 10  # listed by name even then
NAME = 32  # characters of an example's name
HEADS = ("", "code", "file", "what")


def findings_table(findings: Sequence[Finding], *, pictures: int, usable: int, every: bool,
                   width: int | None = None) -> str:
    """The output of `prep scan`: all findings and their counts.

    On a terminal, more than `SCREEN` findings are reduced to the first errors and, for each code, its count and an
    example, unless `every` is set.
    """
    severities = Counter(finding.severity for finding in findings)
    counts = ", ".join([counted(severities[kind], kind) for kind in ("error", "warning")])
    notes = grouped(severities["info"])
    are = "is" if pictures == 1 else "are"
    end = f"{grouped(usable)} of {counted(pictures, 'picture')} {are} usable; {counts}, {notes} info"
    if width is None or every or len(findings) <= SCREEN:
        sums = [_sums(findings)] if width is not None and len(findings) > SCREEN else []
        return page(_findings(findings), *sums, end, width=width)
    errors = [finding for finding in findings if finding.severity == "error"]
    more = [f"and {counted(len(errors) - ERRORS, 'more error')}", ""] if len(errors) > ERRORS else []
    return page(_findings(errors[:ERRORS]), *more, _sums(findings), end,
                "list every finding with --all or --select CODE; full report with --html FILE.html, or --json",
                width=width)


def _findings(findings: Sequence[Finding]) -> TextTable:
    return records(HEADS, [(finding.severity, finding.code, shell_name(finding.path), finding.detail)
                           for finding in findings])


def _sums(findings: Sequence[Finding]) -> TextTable:
    first: dict[tuple[str, str], str] = {
        (finding.severity, finding.code): finding.path for finding in reversed(findings)}
    rows = [(severity, code, grouped(count), _end_of(first[severity, code]), CODES[code][1] if code in CODES else "")
            for severity, code, count in sums_by_code(findings)]
    return table(("", "code", "files", "example", "meaning"), rows, right=(2,))


def _end_of(name: str) -> str:
    """A name for a shell; a long one shortened to its end, the more telling part."""
    return shell_name(name) if len(name) <= NAME else "…" + name[1 - NAME:]


def sums_by_code(findings: Iterable[Finding]) -> list[tuple[str, str, int]]:
    """(severity, code, count), the worst severity first, then the largest count."""
    counts = Counter((finding.severity, finding.code) for finding in findings)
    return sorted(((severity, code, count) for (severity, code), count in counts.items()),
                  key=lambda item: (SEVERITIES.index(item[0]), -item[2], item[1]))


def finding_parts(findings: Sequence[Mapping[str, str]], *, width: int | None, every: bool = False
                  ) -> list[TextTable | str]:
    """A manifest's findings by name. Unless `every`, on a terminal counts by code if there are more than `SCREEN`, and
    in a pipe the first of each code."""
    if every or len(findings) <= SCREEN:
        return [records(HEADS, finding_rows(findings))]
    if width is None:
        shown, rest = first_of_each([finding["code"] for finding in findings], findings)
        return [records(HEADS, finding_rows(shown)), *([rest] if rest else [])]
    return [_sums([Finding(**finding) for finding in findings]),  # type: ignore[arg-type]
            "list every finding with --all or --json, or one sample's with --sample NAME"]


def finding_rows(findings: Iterable[Mapping[str, str]]) -> list[tuple[str, ...]]:
    return [(finding["severity"], finding["code"], shell_name(finding["path"]), finding["detail"])
            for finding in findings]
