"""The table of findings that `prep scan` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from prep.findings import CODES, SEVERITIES, Finding
from prep.report.terminal.tables import _page, _table

SCREEN = 20  # findings; more are summed up by code
ERRORS = 10  # that are shown by name all the same
NAME = 32  # letters of an example's name


def findings_table(findings: Sequence[Finding], *, pictures: int, usable: int, every: bool) -> str:
    """What `prep scan` says: each finding and the sums; or, of more than a screen, the first errors, and how often each
    code comes with an example. `every`: all by name, however many."""
    counts = ", ".join(f"{sum(one.severity == kind for one in findings)} {kind}" for kind in SEVERITIES)
    end = f"{usable} of {pictures} pictures are usable; {counts}"
    if every or len(findings) <= SCREEN:
        return _page(_findings(findings), *([_sums(findings)] if len(findings) > SCREEN else ()), end)
    errors = [one for one in findings if one.severity == "error"]
    more = [f"and {len(errors) - ERRORS} more of severity error", ""] if len(errors) > ERRORS else []
    return _page(_findings(errors[:ERRORS]), *more, _sums(findings), end,
                 "by name: --all, or --select CODE; --html FILE.html, or --json")


def _findings(findings: Sequence[Finding]) -> Table:
    rows = [(one.severity, one.code, one.path, one.detail) for one in findings]
    return _table(("", "code", "file", "what"), rows)


def _sums(findings: Sequence[Finding]) -> Table:
    first: dict[tuple[str, str], str] = {(one.severity, one.code): one.path for one in reversed(findings)}
    rows = [(severity, code, str(count), _end_of(first[severity, code]), CODES[code][1] if code in CODES else "")
            for severity, code, count in sums_by_code(findings)]
    return _table(("", "code", "files", "such as", "meaning"), rows, right=(2,))


def _end_of(name: str) -> str:
    """The end of a long name, which says more than its beginning."""
    return name if len(name) <= NAME else "…" + name[1 - NAME:]


def sums_by_code(findings: Iterable[Finding]) -> list[tuple[str, str, int]]:
    """(severity, code, how many), the worst first, then the most."""
    counts = Counter((one.severity, one.code) for one in findings)
    return sorted(((severity, code, count) for (severity, code), count in counts.items()),
                  key=lambda one: (SEVERITIES.index(one[0]), -one[2], one[1]))


def finding_parts(findings: Sequence[Mapping[str, str]]) -> list[Table | str]:
    """A manifest's findings by name; of more than a screen, how often each code comes."""
    if len(findings) <= SCREEN:
        return [_table(("", "code", "file", "what"), finding_rows(findings))]
    return [_sums([Finding(**one) for one in findings]), "by name: --json, or --sample NAME"]  # type: ignore[arg-type]


def finding_rows(findings: Iterable[Mapping[str, str]]) -> list[tuple[str, ...]]:
    return [(one["severity"], one["code"], one["path"], one["detail"]) for one in findings]
