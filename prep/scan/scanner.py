"""Every picture of a source decoded to its last pixel, every caption and mask read, copies found → a report.

The work is a pure function per item (`examine.check_item`), done by worker processes, so that a decoder that hangs,
crashes or eats memory costs one finding. What did not change since an earlier scan is remembered. A bounded number of
items is under way at a time; what is kept of a picture is 700 bytes, and its thumbnail only as long as there are few
enough to compare: 100,000 pictures take 70 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from prep.findings import Finding, finding
from prep.parse import Unparsed
from prep.progress import Progress, Tick, Total, silent
from prep.scan.compare import Decoders, find_near, pixel_digests
from prep.scan.duplicates.copies import ScannedPicture, exact_copies, near_findings, skipped_finding
from prep.scan.duplicates.correlation import LIMIT, Thumb
from prep.scan.examine import Examined
from prep.scan.memo import ScanMemo, Stamp
from prep.scan.protocol import ItemMessage
from prep.scan.worker import EXAMINE, LIMITS, SERVICE
from prep.sources.item import Item
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import Limits

BATCH = 8  # items of a request: the way there and back costs a twentieth of a picture's decoding
SINGLE = 4  # for each worker: items that are sent alone at first, so that all workers have something to do

Check = Callable[[Item, Examined], Iterable[Finding]]  # what else is to be said of an item


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanReport:
    """What a scan says."""

    pictures: int  # looked at
    samples: int  # of them usable: no finding of severity error
    findings: tuple[Finding, ...]  # sorted by path and code

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(one.severity == severity for one in self.findings)


def nothing_else(_item: Item, _examined: Examined) -> Iterable[Finding]:
    """A `Check` that says nothing."""
    return ()


def scan(items: Iterable[Item | Finding], *, jobs: int, progress: Progress = silent, workers: WorkerPool | None = None,
         limits: Limits = LIMITS, memory: ScanMemo | None = None, check: Check = nothing_else, compare: bool = True,
         total: Total = None) -> ScanReport:
    """The report on `items`, as a source yields them; its findings are taken over.

    `jobs` of `workers` (default: a new pool), which are ended here, decode within `limits`. `compare`: near-duplicates
    are looked for. `total`: how many items there are, for the bar.
    """
    with workers or WorkerPool(SERVICE) as decoders, ThreadPoolExecutor(jobs) as pool:
        work = _Work(workers=decoders, limits=limits, pool=pool, jobs=jobs, memory=memory or ScanMemo(None))
        try:
            with progress("scanning", total, "pictures") as tick:
                findings, album, counts = _gather(_examined(items, work), check, tick)
            return _report(findings, album, counts, work, progress, compare)
        finally:
            decoders.close()  # before the pool waits for who waits for them
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Who decodes, and what is known."""

    workers: WorkerPool
    limits: Limits
    pool: ThreadPoolExecutor
    jobs: int
    memory: ScanMemo


@dataclass(kw_only=True, slots=True)
class _Album:
    """The pictures that can be decoded, and their thumbnails while they are few."""

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


def _gather(results: Iterable[tuple[Item, Examined] | Finding], check: Check,
            tick: Tick) -> tuple[list[Finding], _Album, tuple[int, int]]:
    """What is said of each, what copies are known by, and (pictures looked at, usable ones)."""
    findings: list[Finding] = []
    album = _Album()
    pictures = samples = 0
    for result in results:
        if isinstance(result, Finding):
            findings.append(result)
            continue
        item, examined = result
        pictures, samples = pictures + 1, samples + examined.usable
        findings += [*examined.findings, *check(item, examined)]
        album.add(item, examined)
        tick(1)
    return findings, album, (pictures, samples)


def _report(findings: list[Finding], album: _Album, counts: tuple[int, int], work: _Work, progress: Progress,
            compare: bool) -> ScanReport:
    """The report, with what is to be said of copies."""
    makers = Decoders(workers=work.workers, limits=work.limits, pool=work.pool, memory=work.memory)
    copied, distinct = exact_copies(album.seen, lambda suspects: pixel_digests(suspects, makers))
    findings += copied
    if compare:
        with progress("comparing", len(distinct), "pictures") as tick:
            nears = find_near(distinct, album.thumbs, makers, tick)
        findings += [*skipped_finding(distinct), *near_findings(nears, distinct)]
    work.memory.save()
    ordered = sorted(findings, key=lambda one: (one.path, one.code, one.detail))
    return ScanReport(pictures=counts[0], samples=counts[1], findings=tuple(ordered))


def as_json(report: ScanReport) -> dict[str, Any]:
    """The document of `prep scan --json`."""
    return {"format": "latentry/scan", "version": 1, "pictures": report.pictures, "samples": report.samples,
            "findings": [one.as_json() for one in report.findings]}


# ---- items -----------------------------------------------------------------------------------------------------------


def _examined(items: Iterable[Item | Finding], work: _Work) -> Iterator[tuple[Item, Examined] | Finding]:
    """Findings as they come, and items as they are examined, in no order: one that takes long holds up nobody."""
    done: SimpleQueue[Future[list[_Looked]]] = SimpleQueue()
    batch: list[tuple[Item, Stamp | None]] = []
    sent = under_way = 0

    def submit() -> None:
        work.pool.submit(_examine, list(batch), work).add_done_callback(done.put)
        batch.clear()

    for item in items:
        if isinstance(item, Finding):
            yield item
            continue
        stamp, known = work.memory.get(item)
        if known is not None:
            yield item, known
            continue
        batch.append((item, stamp))
        sent += 1
        if len(batch) >= (1 if sent <= SINGLE * work.jobs else BATCH):
            submit()
            under_way += 1
        while under_way > 2 * work.jobs or not done.empty():
            yield from _noted(done.get(), work.memory)
            under_way -= 1
    if batch:
        submit()
        under_way += 1
    for _ in range(under_way):
        yield from _noted(done.get(), work.memory)


_Looked = tuple[Item, Stamp | None, Examined, bool]  # the last: whether a worker lived to find it


def _examine(batch: Sequence[tuple[Item, Stamp | None]], work: _Work) -> list[_Looked]:
    """What was found in each; where a worker is lost, each is asked for alone, to know of which."""
    try:
        question = tuple(ItemMessage.of(item) for item, _ in batch)
        found = [one.examined() for one in work.workers.ask(EXAMINE, question, work.limits)]
        if len(found) != len(batch):
            raise Unparsed(f"an answer has {len(found)} items, expected {len(batch)}")
        return [(item, stamp, examined, True) for (item, stamp), examined in zip(batch, found, strict=True)]
    except WorkerLost as lost:
        code, detail = _as_finding(lost, work.limits)
    except Unparsed as error:
        code, detail = "decoder-crashed", f"the decoder gave an invalid answer: {error}"
    if len(batch) > 1:
        return [looked for one in batch for looked in _examine([one], work)]
    ((item, stamp),) = batch
    said = finding(item.label, code, detail)
    return [(item, stamp, Examined(findings=(said,), identity=None, thumb=None, captions=()), False)]


def _as_finding(lost: WorkerLost, limits: Limits) -> tuple[str, str]:
    """(code, detail) of the finding on a picture that a worker was lost with."""
    return {"slow": ("decoder-hung", f"was not decoded within {limits.seconds:g} seconds"),
            "memory": ("too-large", "takes more memory than there is"),
            "closed": ("decoder-crashed", "the scan ended before it was decoded"),
            "crash": ("decoder-crashed", f"the decoder ended {lost.detail}")}[lost.cause]


def _noted(future: Future[list[_Looked]], memory: ScanMemo) -> Iterator[tuple[Item, Examined]]:
    for item, stamp, examined, lived in future.result():
        if lived:  # what a worker died of may have been its memory or the load, and is tried again
            memory.note(stamp, item, examined)
        yield item, examined
