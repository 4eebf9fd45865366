"""`prep scan --write-report`: one page with the sums by code, the pictures that have findings, and all findings."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from prep.findings import CODES, Finding
from prep.fs.atomic import write_atomic
from prep.report.pages.frame import render_page, sections, table, words
from prep.report.terminal.scan import sums_by_code
from prep.scan.run import Previews
from prep.scan.scanner import ScanReport

CARDS = 120  # pictures shown
ROWS = 5000  # findings; `prep scan --json` has them all
_WORST = {"error": 0, "warning": 1, "info": 2}


def preview_names(findings: Sequence[Finding]) -> list[str]:
    """The pictures that are shown: the worst first, those that are only remarked upon last."""
    worst: dict[str, int] = {}
    for one in findings:
        worst[one.path] = min(worst.get(one.path, 3), _WORST[one.severity])
    return sorted(worst, key=lambda path: (worst[path], path))[:CARDS]


def write_scan_page(path: Path, report: ScanReport, previews: Previews) -> None:
    """Writes the page to `path`, whole or not at all. Raises `OSError`."""
    write_atomic(path, scan_page(report, previews(preview_names(report.findings))).encode())


def scan_page(report: ScanReport, previews: Mapping[str, bytes]) -> str:
    """The page; `previews` are PNGs by the names of pictures."""
    counts = ", ".join(f"{report.count(severity)} {severity}" for severity in _WORST)
    lead = f"<p>{report.samples} of {report.pictures} pictures are usable; {words(counts)}</p>\n"
    rows = [(one.severity, one.code, one.path, one.detail)
            for one in sorted(report.findings, key=lambda one: (_WORST[one.severity], one.path, one.code))[:ROWS]]
    more = f"<p>and {len(report.findings) - ROWS} more</p>" if len(report.findings) > ROWS else ""
    return render_page("Scan", lead + sections([
        ("By code", _sums(report)),
        ("Pictures", _cards(report, previews)),
        ("Findings", table(("severity", "code", "file", "what"), rows) + more if rows else "<p>none</p>"),
    ]))


def _sums(report: ScanReport) -> str:
    rows = [(severity, code, str(count), CODES[code][1], CODES[code][2])
            for severity, code, count in sums_by_code(report.findings)]
    return table(("severity", "code", "files", "meaning", "what to do"), rows, numbers=(2,)) if rows else "<p>none</p>"


def _cards(report: ScanReport, previews: Mapping[str, bytes]) -> str:
    """A card for each picture that is shown, in the order of `previews`."""
    told: dict[str, list[Finding]] = {}
    for one in report.findings:
        told.setdefault(one.path, []).append(one)
    cards = [_card(name, data, told.get(name, ())) for name, data in previews.items() if data]
    return f'<div class="gallery">\n{"".join(cards)}</div>' if cards else "<p>none</p>"


def _card(name: str, data: bytes, findings: Sequence[Finding]) -> str:
    lines = "<br>".join(f"{words(one.code)}: {words(one.detail)}" for one in findings)
    return (f'<figure><img alt="" style="display:block;margin:0 auto" '
            f'src="data:image/png;base64,{base64.b64encode(data).decode("ascii")}">'
            f"<figcaption><b><bdi>{words(name)}</bdi></b>{lines}</figcaption></figure>\n")
