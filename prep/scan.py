"""Every picture of a source decoded to its last pixel, every caption and mask read, copies found → a report.

The work is a pure function per item (`examine.check_item`), run on threads: decoding releases the GIL. Results are
taken in order, a bounded number ahead, so that memory stays small for sources of any size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from prep.codes import CODES as CODES  # a scan's codes
from prep.duplicates import LIMIT, Near, near_duplicates
from prep.examine import Examined, Identity, check_item, finding
from prep.records import Finding, Item

Tick = Callable[[int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a scan says."""

    pictures: int  # looked at
    samples: int  # of them usable: no finding of severity error
    findings: tuple[Finding, ...]  # sorted by path and code

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(one.severity == severity for one in self.findings)


def scan(items: Iterable[Item | Finding], *, jobs: int, tick: Tick = lambda _: None) -> Report:
    """The report on `items`, as a source yields them; its findings are taken over. `tick(1)` after each picture."""
    findings: list[Finding] = []
    identities: list[tuple[str, Identity]] = []
    pictures = samples = 0
    for result in _examined(items, jobs):
        if isinstance(result, Finding):
            findings.append(result)
            continue
        pictures, samples = pictures + 1, samples + result.usable
        findings.extend(result.findings)
        if result.identity is not None:
            identities.append((result.name, result.identity))
        tick(1)
    findings.extend(copies(identities))
    ordered = sorted(findings, key=lambda one: (one.path, one.code, one.detail))
    return Report(pictures=pictures, samples=samples, findings=tuple(ordered))


def as_json(report: Report) -> dict[str, Any]:
    """The document of `prep scan --json`."""
    findings = [{"path": one.path, "code": one.code, "severity": one.severity, "detail": one.detail}
                for one in report.findings]
    return {"format": "latentry/scan", "version": 1, "pictures": report.pictures, "samples": report.samples,
            "findings": findings}


def _examined(items: Iterable[Item | Finding], jobs: int) -> Iterator[Examined | Finding]:
    """Findings as they come, items examined, in order."""
    waiting: deque[Future[Examined]] = deque()
    with ThreadPoolExecutor(jobs) as pool:
        for item in items:
            if isinstance(item, Finding):
                yield item
                continue
            waiting.append(pool.submit(check_item, item))
            if len(waiting) > 2 * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# ---- copies ----------------------------------------------------------------------------------------------------------


def copies(identities: Sequence[tuple[str, Identity]]) -> Iterator[Finding]:
    """One finding for each picture that is a copy of another; the original of a group is passed over.

    The original is the largest, then the one with the shortest name: copies tend to have longer ones.
    """
    ordered = sorted(identities, key=_rank)
    files: dict[str, str] = {}
    pixels: dict[str, str] = {}
    distinct: list[tuple[str, Identity]] = []
    for name, identity in ordered:
        if identity.file in files:
            yield finding(name, "exact-duplicate", f"same bytes as {files[identity.file]}")
        elif identity.pixels in pixels:
            yield finding(name, "pixel-duplicate", f"same pixels as {pixels[identity.pixels]}")
        else:
            distinct.append((name, identity))
        files.setdefault(identity.file, name)
        pixels.setdefault(identity.pixels, name)
    yield from _near_copies(distinct)


def _rank(named: tuple[str, Identity]) -> tuple[int, int, str]:
    name, identity = named
    return -identity.size[0] * identity.size[1], len(PurePosixPath(name).name), name


def _near_copies(distinct: Sequence[tuple[str, Identity]]) -> Iterator[Finding]:
    """Near-duplicates among pictures sorted by rank, each reported once, against the first it resembles."""
    if len(distinct) > LIMIT:
        yield finding(".", "duplicates-skipped", f"{len(distinct)} pictures; copies that are not exact are looked for "
                                                 f"among up to {LIMIT}")
        return
    found: dict[int, Near] = {}
    for near in sorted(near_duplicates([identity.thumb for _, identity in distinct]), key=lambda near: near.mirrored):
        found.setdefault(near.second, near)
    for near in found.values():
        code = "mirrored-duplicate" if near.mirrored else "near-duplicate"
        alike = "the mirror image of" if near.mirrored else "nearly the same picture as"
        yield finding(distinct[near.second][0], code, f"{alike} {distinct[near.first][0]} ({near.score:.3f} of 1)")
