"""Scans a source: decodes every picture to its last pixel, reads every caption, mask and reference, finds copies,
and reports.

The work is a pure function per item (`examine.check_item`), run by worker processes, so that a decoder that hangs,
crashes or exhausts memory costs one finding. Results on unchanged files are remembered. A bounded number of items is in
progress at a time. The scan keeps 700 bytes per picture, and thumbnails only while there are few enough to compare:
100,000 pictures take 70 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prep.findings import Finding, finding
from prep.progress import Progress, Tick, Total, silent
from prep.scan.compare import Decoders, find_near, pixel_digests
from prep.scan.crew import Examine, Request, ScanCrew, batch_size, local_crew, looked_at
from prep.scan.duplicates.copies import ScannedPicture, exact_copies, near_findings, skipped_finding
from prep.scan.duplicates.correlation import LIMIT, Thumb
from prep.scan.examine import Examined
from prep.scan.examiner import Examiner
from prep.scan.memo import ScanMemo, Stamp
from prep.scan.quality import odd_lengths
from prep.scan.references import ReferencePairs
from prep.scan.worker import LIMITS, SERVICE
from prep.sources.item import Item
from prep.workers.pool import WorkerPool
from prep.workers.service import Limits

Check = Callable[[Item, Examined], Iterable[Finding]]  # further findings on an item


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanReport:
    """The result of a scan."""

    pictures: int  # examined
    samples: int  # usable ones of these: no finding of severity error
    findings: tuple[Finding, ...]  # sorted by path and code

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(finding.severity == severity for finding in self.findings)


def nothing_else(_item: Item, _examined: Examined) -> Iterable[Finding]:
    """A `Check` without findings."""
    return ()


def scan(items: Iterable[Item | Finding], *, jobs: int, progress: Progress = silent, workers: WorkerPool | None = None,
         limits: Limits = LIMITS, memory: ScanMemo | None = None, check: Check = nothing_else, compare: bool = True,
         total: Total = None, crew: ScanCrew | None = None) -> ScanReport:
    """The report on `items`, which also contains the findings among them.

    `jobs` of `workers` (default: a new pool) decode within `limits`, or `crew` does; they end with the scan.
    `compare`: search for near-duplicates. `total`: the number of items and of their references, for the progress bar.
    """
    memory = memory or ScanMemo(None)
    with crew or local_crew(Examiner(workers or WorkerPool(SERVICE), limits), jobs) as hired:
        with progress("scanning", total, "pictures") as tick:
            pairs = ReferencePairs()
            findings, album, counts = _gather(_examined(pairs.apart(items), hired, memory), pairs, check, tick)
        return _report(findings, album, pairs, counts, Decoders(crew=hired, memory=memory), progress, compare)


@dataclass(kw_only=True, slots=True)
class _Album:
    """The decodable pictures, and their thumbnails while there are few enough."""

    seen: list[ScannedPicture] = field(default_factory=list)
    thumbs: dict[str, Thumb] = field(default_factory=dict)  # by digest of the file
    full: bool = False

    def add(self, item: Item, examined: Examined) -> None:
        if examined.identity is None:
            return
        self.seen.append(ScannedPicture(name=item.label, identity=examined.identity, picture=item.picture))
        if examined.thumb is not None and not self.full:
            self.thumbs[examined.identity.file] = examined.thumb
            self.full = len(self.thumbs) > LIMIT
        if self.full:
            self.thumbs.clear()


def _gather(results: Iterable[tuple[Item, Examined] | Finding], pairs: ReferencePairs, check: Check,
            tick: Tick) -> tuple[list[Finding], _Album, tuple[int, int]]:
    """(findings, album, (number of pictures, number of usable ones))."""
    findings: list[Finding] = []
    album = _Album()
    lengths: dict[str, int] = {}  # characters of the longest caption, by label
    pictures = samples = 0
    sound: set[str] = set()  # usable pictures that have a reference, or lack one
    for result in results:
        if isinstance(result, Finding):
            findings.append(result)
            continue
        item, examined = result
        tick(1)
        if item.is_reference:
            pairs.note(item, examined.findings)
            continue
        pictures, samples = pictures + 1, samples + examined.usable
        findings += [*examined.findings, *check(item, examined)]
        album.add(item, examined)
        if examined.captions and any(examined.captions):
            lengths[item.label] = max(map(len, examined.captions))
        if examined.usable and item.label in pairs.labels:
            sound.add(item.label)
    beside = list(pairs.findings())
    samples -= len(sound & {finding.path for finding in beside if finding.severity == "error"})
    findings += beside
    labels = list(lengths)
    findings += [finding(labels[index], "odd-length", said) for index, said in odd_lengths(list(lengths.values()))]
    return findings, album, (pictures, samples)


def _report(findings: list[Finding], album: _Album, pairs: ReferencePairs, counts: tuple[int, int], makers: Decoders,
            progress: Progress, compare: bool) -> ScanReport:
    """The report, with findings on copies added."""
    copied, distinct = exact_copies(album.seen, lambda suspects: pixel_digests(suspects, makers))
    findings += copied
    if compare:
        with progress("comparing", len(distinct), "pictures") as tick:
            nears = [near for near in find_near(distinct, album.thumbs, makers, tick)
                     if not pairs.joins(distinct[near.first], distinct[near.second])]
        findings += [*skipped_finding(distinct), *near_findings(nears, distinct)]
    makers.memory.save()
    ordered = sorted(findings, key=lambda finding: (finding.path, finding.code, finding.detail))
    return ScanReport(pictures=counts[0], samples=counts[1], findings=tuple(ordered))


def as_json(report: ScanReport) -> dict[str, Any]:
    """The document of `prep scan --json`."""
    return {"format": "latentry/scan", "version": 1, "pictures": report.pictures, "samples": report.samples,
            "findings": [finding.as_json() for finding in report.findings]}


# ---- items -----------------------------------------------------------------------------------------------------------


def _examined(items: Iterable[Item | Finding], crew: ScanCrew,
              memory: ScanMemo) -> Iterator[tuple[Item, Examined] | Finding]:
    """Findings as they arrive, and items once examined, in any order: a slow item does not delay the others."""
    batch: list[tuple[Item, Stamp | None]] = []
    sent = 0
    for item in items:
        if isinstance(item, Finding):
            yield item
            continue
        stamp, known = memory.get(item)
        if known is not None:
            yield item, known
            continue
        batch.append((item, stamp))
        sent += 1
        if len(batch) >= batch_size(crew, sent):
            crew.add(Examine(batch))
            batch = []
            yield from _noted(crew.step(0), memory)
        while crew.full:
            yield from _noted(crew.step(), memory)
    if batch:
        crew.add(Examine(batch))
    while crew.pending:
        yield from _noted(crew.step(), memory)


def _noted(completed: Iterable[tuple[Request, Any]], memory: ScanMemo) -> Iterator[tuple[Item, Examined]]:
    """The items of requests that are completed; remembers the results of those that still are as they were listed."""
    for request, result in completed:
        assert isinstance(request, Examine), "pictures are compared when all are examined"
        for item, stamp, looked in looked_at(request, result):
            if looked.lived:  # a lost worker: memory or load may be at fault; the next scan tries again
                same = looked.read is None or memory.is_current(looked.read, stamp)
                memory.note(stamp if same else None, item, looked.examined)
            yield item, looked.examined
