"""Reads a recipe's pictures for the pages, with the code of `prep encode`: headers, captions, and how much masks cover.

Only masks are decoded, and pictures whose files seem to lack their end. Facts of files are remembered, and what earlier
scans found is recalled, so that the next start opens only files that changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from prep.dataset.bucketing import rules_of
from prep.dataset.facts import fact_kinds, open_facts
from prep.dataset.ingest import KnownItem, ingest
from prep.dataset.listing import list_recipe
from prep.dataset.reading import FactReader, NotRead
from prep.dataset.samples import settle_masks
from prep.findings import CODES, Finding, finding
from prep.fs.blob import Blob
from prep.fs.memo import Fact, Memo
from prep.progress import DeferredTotal, Progress, phase
from prep.recipe.schema import Recipe
from prep.runtime import gc_disabled
from prep.scan.run import ScanCall, recall_scan, run_scan

KINDS = {"file": "mask-mean", "alpha": "alpha-mean"}  # of facts, by where masks come from


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The usable pictures of a recipe, and what is known of all."""

    original: Recipe  # as it was read
    recipe: Recipe  # with masks "auto" replaced
    items: tuple[KnownItem, ...]
    findings: tuple[Finding, ...]  # of listing, reading and scanning
    rejected: int  # pictures that cannot be used
    coverage: Mapping[str, float]  # of masks, 0 to 1, by label
    unseen: int  # pictures that no scan has decoded as they are


def survey_source(recipe: Recipe, *, jobs: int, scan: bool, progress: Progress) -> Survey:
    """Surveys a recipe; with `scan`, after decoding every picture. Raises `PathError`, `ConfigError`."""
    rules_of(recipe)  # reports wrong rules before all pictures are read
    facts = open_facts()
    try:
        with gc_disabled(), progress("reading", total := DeferredTotal(), "pictures") as tick:
            listed = list_recipe(recipe)
            ingested = ingest(recipe, facts, jobs=jobs, tick=tick, total=total, listed=listed)
        settled = settle_masks(recipe, ingested.items)
        coverage = coverage_of(settled, ingested.items, facts, jobs=jobs, progress=progress)
        cut = [(known.item.label, known.item.picture) for known in ingested.items if known.cut]
        faults = _facts_of(cut, "fault", "pictures", facts, jobs=jobs, progress=progress) if cut else []
    finally:
        facts.close()
    with gc_disabled(), phase(progress, "recalling earlier scans"):
        scanned, unseen = recall_scan(settled, listed.items)
    if scan or not unseen:  # if all is remembered, a scan decodes nothing
        scanned = run_scan(ScanCall(recipe=settled, jobs=jobs, model=None, select=(), ignore=(), show=None,
                                    rehash=False, progress=progress)).findings
        unseen = 0
    scanned = (*scanned, *(finding(label, fact["code"], fact["detail"], as_error=True)
                           for label, fact in faults if fact))
    rejects = [error for error in ingested.findings if error.severity == "error"]
    broken = {bad.path for bad in scanned if _is_unusable(bad.code)}
    items = tuple(known for known in ingested.items if known.item.label not in broken)
    return Survey(original=recipe, recipe=settled, items=items, coverage=coverage, unseen=unseen,
                  rejected=len(rejects) + len(ingested.items) - len(items),
                  findings=tuple(_each_once([*scanned, *ingested.findings, *without_caption(items)])))


def _is_unusable(code: str) -> bool:
    """Whether a scan's finding is that the picture itself cannot be decoded: prep encode rejects it, too."""
    return CODES[code][0] == "error" and not code.startswith(("caption", "mask", "missing-mask", "bad-table"))


def coverage_of(recipe: Recipe, items: Sequence[KnownItem], facts: Memo, *, jobs: int,
                progress: Progress) -> dict[str, float]:
    """The part of each picture that its mask lets train, 0 to 1, by label; pictures without a mask that can be read are
    left out."""
    masks = [(item.item.label, blob) for item in items if (blob := mask_of(recipe, item)) is not None]
    if not masks:
        return {}
    means = _facts_of(masks, KINDS[recipe.mask_origin], "masks", facts, jobs=jobs, progress=progress)
    return {label: fact["mean"] for label, fact in means if fact["mean"] is not None}


def _facts_of(files: Sequence[tuple[str, Blob]], kind: str, what: str, facts: Memo, *, jobs: int,
              progress: Progress) -> list[tuple[str, Fact]]:
    """A fact of each file that can be read, with its label."""
    reader, called = FactReader(), fact_kinds()[kind]

    def read(blob: Blob) -> Fact | None:
        try:
            return facts.get_or_read(blob, called, partial(reader.read, kind), stop=reader.closed)
        except (NotRead, OSError, MemoryError):
            return None

    with progress(f"reading {what}", len(files), what) as tick, ThreadPoolExecutor(jobs) as pool:
        try:
            read_facts = []
            for (label, _), fact in zip(files, pool.map(read, [blob for _, blob in files]), strict=True):
                tick(1)
                if fact is not None:
                    read_facts.append((label, fact))
            return read_facts
        finally:
            reader.close()  # first, since threads wait for answers
            pool.shutdown(cancel_futures=True)


def mask_of(recipe: Recipe, item: KnownItem) -> Blob | None:
    """The file that a picture's mask comes from; `None` if all of it trains."""
    origin = "none" if recipe.mask_of(item.item.source) == "none" else recipe.mask_origin
    if origin == "alpha":
        return item.item.picture if item.has_alpha else None
    return item.item.mask if origin == "file" and item.mask is not None else None


def without_caption(items: Sequence[KnownItem]) -> Iterator[Finding]:
    """A finding for each item whose captions are all empty."""
    for item in items:
        if not any(caption for caption, _ in item.captions):
            yield finding(item.item.label, "missing-caption", "has no caption, or an empty one")


def _each_once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """The first finding of each code on a picture; an empty caption is a missing one, too."""
    empty = [each.path for each in findings if each.code == "empty-caption"]
    seen: set[tuple[str, str]] = {(path, "missing-caption") for path in empty}
    for each in findings:
        if (each.path, each.code) not in seen:
            seen.add((each.path, each.code))
            yield each
