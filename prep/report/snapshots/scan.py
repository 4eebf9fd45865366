"""Writes the page of `prep scan --html`: sums, duplicates side by side, pictures with findings, all findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prep.findings import CODES, SEVERITIES, Finding
from prep.fs.atomic import write_atomic
from prep.pages.overlay import Shot
from prep.pages.parts import Card, Column, Head, PairSide, PicturePair, Section, Stat, Table, plural
from prep.pages.snapshot import EmbeddedPictures, PageOrigin, render_snapshot
from prep.report.terminal.scan import sums_by_code
from prep.scan.run import Previews
from prep.scan.scanner import ScanReport

CARDS = 120  # pictures shown
PAIRS = 60  # duplicates shown beside their originals
ROWS = 200  # findings per code
ALL_ROWS = 2000  # findings in total, the worst first
ELSEWHERE = "prep scan --json lists every finding."
SAME = {"exact-duplicate", "pixel-duplicate"}
MOST_ALIKE = 0.999  # largest similarity shown for pictures with different pixels
RELATIONS = {"exact-duplicate": "same bytes as", "pixel-duplicate": "same pixels as",
             "near-duplicate": "resembles", "mirrored-duplicate": "mirror image of"}
NO_PREVIEW = "This picture cannot be shown."


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeGroup:
    """All findings of one code and severity."""

    code: str
    severity: str
    count: int
    first: bool  # the worst severity of its code, which links lead to
    meaning: str
    todo: str
    open: bool
    table: Table


def write_scan_page(path: Path, origin: PageOrigin, report: ScanReport, previews: Previews) -> None:
    """Writes the page to `path` atomically. Raises `OSError`."""
    write_atomic(path, scan_page(origin, report, previews(preview_names(report.findings))).encode())


def preview_names(findings: Sequence[Finding]) -> list[str]:
    """Lists the pictures that the page shows, each once: those of pairs, then those with cards."""
    pairs = shown_pairs(findings)
    names = [name for duplicate in pairs for name in (duplicate.path, duplicate.other or "")]
    return list(dict.fromkeys([*names, *_card_names(findings, pairs)]))


def shown_pairs(findings: Sequence[Finding]) -> list[Finding]:
    """Lists the duplicates shown as pairs: the worst severity first, near duplicates before exact duplicates."""
    duplicates = [finding for finding in findings if finding.other is not None]
    return sorted(duplicates, key=lambda duplicate: (SEVERITIES.index(duplicate.severity), duplicate.code in SAME,
                                               -(duplicate.likeness or 0), duplicate.path))[:PAIRS]


def _card_names(findings: Sequence[Finding], pairs: Sequence[Finding]) -> list[str]:
    """Lists the pictures with a card, the worst first. A finding that a pair shows needs no card."""
    paired = {(pair.path, pair.code) for pair in pairs}
    worst: dict[str, int] = {}
    for finding in findings:
        if (finding.path, finding.code) not in paired:
            rank = SEVERITIES.index(finding.severity)
            worst[finding.path] = min(worst.get(finding.path, rank), rank)
    return sorted(worst, key=lambda path: (worst[path], path))[:CARDS]


def scan_page(origin: PageOrigin, report: ScanReport, previews: Mapping[str, bytes]) -> str:
    """Renders the page. `previews`: JPEGs by picture name."""
    pictures = EmbeddedPictures()
    chosen = shown_pairs(report.findings)
    pairs = [_pair(duplicate, previews, pictures) for duplicate in chosen]
    cards = _cards(report, [name for name in _card_names(report.findings, chosen) if previews.get(name)], previews,
                   pictures)
    sums = _sums(report)
    sections = [Section(id="codes", title="Findings by code", count=len(sums.rows))]
    if pairs:
        every = sum(finding.other is not None for finding in report.findings)
        sections.append(Section(id="duplicates", title="Duplicates", count=every, note=_more(every, len(pairs))))
    if cards:
        every = len({finding.path for finding in report.findings})
        sections.append(Section(id="pictures", title="Pictures with findings", count=len(cards), note=(
            f"{plural(every, 'file has', 'files have')} findings. {len(cards):,} of them "
            f"{'is' if len(cards) == 1 else 'are'} shown here: only pictures that can be decoded, the worst first.")))
    sections.append(Section(id="findings", title="All findings", count=len(report.findings)))
    return render_snapshot("scan.html", origin, head=_head(report), sections=sections, codes=sums, pairs=pairs,
                           cards=cards, groups=_groups(report))


def _more(every: int, shown: int) -> str:
    return f"The {shown:,} worst are shown here. {ELSEWHERE}" if every > shown else ""


def _head(report: ScanReport) -> Head:
    errors, warnings, infos = (report.count(severity) for severity in SEVERITIES)
    broken = report.pictures - report.samples
    if not report.pictures:
        todo, tone = "Check the path of the source, and include and exclude of the recipe.", "error"
    elif errors or broken:
        todo = (f"Repair, replace or remove the files with the {plural(errors, 'error')} below"
                + (f", then look at the {plural(warnings, 'warning')}." if warnings else "."))
        tone = "error"
    elif warnings:
        todo, tone = f"Look at the {plural(warnings, 'warning')} below. No warning stops prep encode.", "warning"
    else:
        todo, tone = "Run prep bucket, or prep encode.", "good"
    whole = plural(report.pictures, "picture")
    return Head(
        kind="Scan", what=whole, todo=todo, part=report.samples / report.pictures if report.pictures else None,
        tone=tone,  # type: ignore[arg-type]  # one of three
        usable=f"{report.samples:,} of {whole} can be used" if report.pictures else "No picture was found",
        stats=(Stat(value=f"{report.pictures:,}", label="pictures"),
               Stat(value=f"{report.samples:,}", label="usable", tone="good"),
               Stat(value=f"{errors:,}", label="errors", tone="error"),
               Stat(value=f"{warnings:,}", label="warnings", tone="warning"),
               Stat(value=f"{infos:,}", label="notes", tone="info")))


def _sums(report: ScanReport) -> Table:
    rows = tuple((severity, code, f"{count:,}", CODES[code][1], CODES[code][2])
                 for severity, code, count in sums_by_code(report.findings))
    return Table(caption="Findings by code", rows=rows, columns=(
        Column(head="severity", kind="severity"), Column(head="code", kind="group"),
        Column(head="files", kind="number"), Column(head="meaning"), Column(head="what to do")))


def _groups(report: ScanReport) -> list[CodeGroup]:
    """Groups the findings by code, the worst first; info is folded."""
    members: dict[tuple[str, str], list[Finding]] = {}
    for finding in report.findings:
        members.setdefault((finding.severity, finding.code), []).append(finding)
    sums = sums_by_code(report.findings)
    worst = {code: severity for severity, code, _ in reversed(sums)}
    groups, room = [], ALL_ROWS
    for severity, code, count in sums:
        rows = min(count, ROWS, room)
        room -= rows
        groups.append(CodeGroup(
            code=code, severity=severity, count=count, first=worst[code] == severity, meaning=CODES[code][1],
            todo=CODES[code][2], open=severity != "info", table=_files(code, members[severity, code], rows)))
    return groups


def _files(code: str, findings: Sequence[Finding], rows: int) -> Table:
    return Table(caption=f"Files with {code}", columns=(Column(head="file", kind="name"), Column(head="what")),
                 rows=tuple((finding.path, finding.detail) for finding in findings[:rows]), more=len(findings) - rows,
                 elsewhere=ELSEWHERE)


def _pair(duplicate: Finding, previews: Mapping[str, bytes], pictures: EmbeddedPictures) -> PicturePair:
    def side(label: str, name: str) -> PairSide:
        return PairSide(label=label, shot=Shot(name=name, address=pictures.add(previews.get(name)), instead=NO_PREVIEW))

    likeness = "the same" if duplicate.code in SAME else f"{min(duplicate.likeness or 0, MOST_ALIKE):.1%} alike"
    return PicturePair(finding=duplicate, likeness=likeness, sides=(
        side("picture", duplicate.path),
        side(RELATIONS.get(duplicate.code, "resembles"), duplicate.other or "")))


def _cards(report: ScanReport, names: Sequence[str], previews: Mapping[str, bytes],
           pictures: EmbeddedPictures) -> list[Card]:
    """Makes a card for each of these pictures, in order."""
    findings: dict[str, list[Finding]] = {}
    for finding in report.findings:
        findings.setdefault(finding.path, []).append(finding)
    return [_card(name, sorted(findings[name], key=lambda finding: SEVERITIES.index(finding.severity)),
                  pictures.add(previews.get(name))) for name in names]


def _card(name: str, findings: Sequence[Finding], address: str) -> Card:
    return Card(shot=Shot(name=name, address=address, instead=NO_PREVIEW), tone=findings[0].severity,
                findings=tuple(findings))
