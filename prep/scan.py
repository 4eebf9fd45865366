"""Every picture of a source decoded to its last pixel, every caption and mask read, copies found → a report.

The work is a pure function per item (`examine.check_item`), run on threads: decoding releases the GIL. Results are
taken in order, a bounded number ahead, so that memory stays small for sources of any size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from prep.codes import CODES as CODES  # a scan's codes
from prep.duplicates import LIMIT, Near, near_duplicates
from prep.examine import Examined, Identity, check_item, finding
from prep.records import Finding, Item

Tick = Callable[[int], object]
Progress = Callable[[str, int | None, str], AbstractContextManager[Tick]]  # title, total, unit
Named = tuple[str, Identity]  # a picture's name, and what its copies are known by


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a scan says."""

    pictures: int  # looked at
    samples: int  # of them usable: no finding of severity error
    findings: tuple[Finding, ...]  # sorted by path and code

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(one.severity == severity for one in self.findings)


def silent(_title: str, _total: int | None, _unit: str) -> AbstractContextManager[Tick]:
    """A `Progress` that nobody sees."""
    return nullcontext(lambda _: None)


def scan(items: Iterable[Item | Finding], *, jobs: int, progress: Progress = silent) -> Report:
    """The report on `items`, as a source yields them; its findings are taken over."""
    findings: list[Finding] = []
    identities: list[Named] = []
    pictures = samples = 0
    with progress("scanning", None, "pictures") as tick:
        for result in _examined(items, jobs):
            if isinstance(result, Finding):
                findings.append(result)
                continue
            pictures, samples = pictures + 1, samples + result.usable
            findings.extend(result.findings)
            if result.identity is not None:
                identities.append((result.name, result.identity))
            tick(1)
    copied, distinct = copies(identities)
    with progress("comparing", len(distinct), "pictures") as tick:
        near = near_copies(distinct, tick)
    findings += [*copied, *near]
    ordered = sorted(findings, key=lambda one: (one.path, one.code, one.detail))
    return Report(pictures=pictures, samples=samples, findings=tuple(ordered))


def as_json(report: Report) -> dict[str, Any]:
    """The document of `prep scan --json`."""
    return {"format": "latentry/scan", "version": 1, "pictures": report.pictures, "samples": report.samples,
            "findings": [one.as_json() for one in report.findings]}


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


def copies(identities: Iterable[Named]) -> tuple[list[Finding], list[Named]]:
    """One finding for each exact copy of another picture, and the pictures that are none, by rank.

    The original is the largest, then the one with the shortest name: copies tend to have longer ones.
    """
    files: dict[str, str] = {}
    pixels: dict[str, str] = {}
    found: list[Finding] = []
    distinct: list[Named] = []
    for name, identity in sorted(identities, key=_rank):
        if identity.file in files:
            found.append(finding(name, "exact-duplicate", f"same bytes as {files[identity.file]}"))
        elif identity.pixels in pixels:
            found.append(finding(name, "pixel-duplicate", f"same pixels as {pixels[identity.pixels]}"))
        else:
            distinct.append((name, identity))
        files.setdefault(identity.file, name)
        pixels.setdefault(identity.pixels, name)
    return found, distinct


def _rank(named: Named) -> tuple[int, int, str]:
    name, identity = named
    return -identity.size[0] * identity.size[1], len(PurePosixPath(name).name), name


def near_copies(distinct: Sequence[Named], tick: Tick) -> list[Finding]:
    """Near-duplicates among pictures sorted by rank, each reported once, against the first it resembles."""
    if len(distinct) > LIMIT:
        many = f"{len(distinct)} pictures; copies that are not exact are looked for among up to {LIMIT}"
        return [finding(".", "duplicates-skipped", many)]
    found: dict[int, Near] = {}
    alike = near_duplicates([identity.thumb for _, identity in distinct], tick)
    for near in sorted(alike, key=lambda near: near.mirrored):
        found.setdefault(near.second, near)
    return [_near_finding(near, distinct) for near in found.values()]


def _near_finding(near: Near, distinct: Sequence[Named]) -> Finding:
    code = "mirrored-duplicate" if near.mirrored else "near-duplicate"
    alike = "the mirror image of" if near.mirrored else "nearly the same picture as"
    return finding(distinct[near.second][0], code, f"{alike} {distinct[near.first][0]} ({near.score:.3f} of 1)")
