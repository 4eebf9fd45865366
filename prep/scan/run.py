"""Runs `prep scan`: the scan itself, with the memory of earlier ones, token counts of captions, and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace

from prep.captions.variants import captions_of
from prep.dataset.bucketing import family_of, least_side_check, mask_lacking
from prep.dataset.listing import walk_recipe
from prep.dataset.texts import over_limit, reading_of
from prep.errors import UsageError
from prep.findings import Finding, apply_policy, finding, parse_code
from prep.fs.blob import Blob
from prep.fs.place import real_name
from prep.parse import KEPT, REFUSED, Unparsed
from prep.progress import BackgroundTotal, Progress
from prep.recipe.schema import Recipe
from prep.runtime import defer_interrupts
from prep.scan.crew import on_cluster
from prep.scan.examine import Examined
from prep.scan.memo import ScanMemo, usual_path
from prep.scan.protocol import BlobMessage, PreviewMessage
from prep.scan.references import ReferencePairs, count_items
from prep.scan.scanner import Check, ScanReport, nothing_else, scan
from prep.scan.worker import LIMITS, PREVIEW, SERVICE
from prep.sources.item import Item
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.ray import ClusterOptions

SIDE = 320  # pixels of a preview's longer side
UNSAID = {"missing-caption", "empty-caption"}
TRANSPARENT = {"has-alpha", "fully-transparent"}
NEAR_CODES = {"near-duplicate", "mirrored-duplicate", "duplicates-skipped"}


Previews = Callable[[Sequence[str]], Mapping[str, bytes]]  # names of items to a small JPEG of each, if it has one
Show = Callable[[ScanReport, Previews], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanCall:
    """The settings of a scan from the command line."""

    recipe: Recipe
    jobs: int
    model: str | None
    select: Sequence[str]
    ignore: Sequence[str]
    show: Show | None  # writes a page of the report
    rehash: bool
    progress: Progress
    cluster: ClusterOptions | None = None  # None: this computer examines pictures
    notice: Callable[[str], None] = lambda _: None


def run_scan(call: ScanCall) -> ScanReport:
    """The report, with the selected findings only. Raises `UsageError`, `PathError`, `ModelError`."""
    _check(call)
    recipe, choice, compare = call.recipe, call.recipe.scan, _compares(call)
    tokens = nothing_else if call.model is None else _token_check(call.model, recipe)
    blobs: dict[str, Blob] = {}
    owners: dict[str, int] = {}  # the sources of pictures without a caption
    small: dict[str, bool] = {}  # pictures below the recipe's minimum side, and whether they are usable otherwise
    bare: dict[str, bool] = {}  # the same of those without a mask that the model needs, or with what is refused
    below, unmasked = least_side_check(recipe), _mask_check(recipe)

    def check(item: Item, examined: Examined) -> Iterable[Finding]:
        if any(finding.code in UNSAID for finding in examined.findings):
            owners[item.label] = item.source
        if examined.identity is None:
            return tokens(item, examined)
        if call.show is not None:
            blobs[item.label] = item.picture
        lacking, short = list(unmasked(item, examined)), below(item.label, examined.identity.size)
        if lacking or _is_refused(examined, recipe):
            bare[item.label] = examined.usable
        if short is not None:
            small[item.label] = examined.usable
        return (*tokens(item, examined), *lacking, *(() if short is None else (short,)))

    elsewhere = nullcontext() if call.cluster is None else on_cluster(call.cluster, recipe, call.notice)
    with elsewhere as crew, closing(_memory(call)) as memory:
        report = scan(walk_recipe(recipe, rehash=call.rehash), jobs=call.jobs, progress=call.progress,
                      memory=memory, check=check, compare=compare, crew=crew,
                      total=BackgroundTotal(lambda: count_items(walk_recipe(recipe))))
    broken = {finding.path for finding in report.findings if finding.severity == "error"}
    left_out = {finding.path for finding in report.findings if _left_out(finding, recipe, owners)} - broken
    left_out |= {name for name, usable in (*small.items(), *bare.items()) if usable}
    said = (_with_policy(finding, recipe, owners) for finding in report.findings
            if finding.path not in small or finding.code != "too-small" or finding.severity == "error")  # one a picture
    report = replace(report, samples=report.samples - len(left_out),
                     findings=apply_policy(said, choice, select=call.select, ignore=call.ignore))
    if call.show is not None:
        call.show(report, lambda names: _previews([name for name in names if name in blobs], blobs, call.jobs))
    return report


def _compares(call: ScanCall) -> bool:
    """Whether near-duplicates are asked for."""
    nears = [finding(".", code, "") for code in sorted(NEAR_CODES)]
    return bool(apply_policy(nears, call.recipe.scan, select=call.select, ignore=call.ignore))


def recall_scan(recipe: Recipe, items: Iterable[Item]) -> tuple[tuple[Finding, ...], int]:
    """(what earlier scans found in each picture of a recipe, with its policy; the number of pictures that no scan has
    seen as they are). Opens no picture."""
    findings: list[Finding] = []
    owners: dict[str, int] = {}
    pairs = ReferencePairs()
    unseen, memory = 0, ScanMemo(usual_path())
    try:
        for item in pairs.apart(items):
            assert isinstance(item, Item), "only items were given"
            known = memory.get(item)[1]
            unseen += known is None
            if item.is_reference:
                pairs.note(item, known.findings if known is not None else ())
                continue
            owners[item.label] = item.source
            findings += known.findings if known is not None else ()
        findings += pairs.findings()
    finally:
        memory.close()
    return apply_policy([_with_policy(finding, recipe, owners) for finding in findings], recipe.scan), unseen


def _memory(call: ScanCall) -> ScanMemo:
    return ScanMemo(usual_path(), trust=not call.rehash,
                    sources=[real_name(source.path) for source in call.recipe.sources])


def _check(call: ScanCall) -> None:
    for option, codes in (("--select", call.select), ("--ignore", call.ignore)):
        for code in codes:
            try:
                parse_code(code, option)
            except Unparsed as error:
                raise UsageError(str(error), hint="the table of codes is in README.md") from None


def _with_policy(finding: Finding, recipe: Recipe, owners: Mapping[str, int]) -> Finding:
    """The finding, with the recipe's policy if a caption is missing or empty: info if the policy supplies a caption; or
    if the picture has transparency: info if it is kept."""
    if finding.code == "has-alpha" and recipe.image.alpha == KEPT:
        return replace(finding, severity="info", detail=f"{finding.detail}; that is kept")
    if finding.code in TRANSPARENT and recipe.image.alpha == REFUSED:
        return replace(finding, detail=f"{finding.detail}; such pictures are skipped")
    if finding.code not in UNSAID:
        return finding
    choice = recipe.caption_of(owners.get(finding.path, 0))
    instead = {"empty": "an empty one", "filename": "its name", "constant": f"'{choice.constant}'"}.get(choice.missing)
    if instead is not None:
        return replace(finding, severity="info", detail=f"{finding.detail}; {instead} is used")
    if choice.missing == "reject":
        return replace(finding, detail=f"{finding.detail}; the picture is skipped")
    return finding


def _is_refused(examined: Examined, recipe: Recipe) -> bool:
    """Whether the recipe refuses a picture for its transparency."""
    return recipe.image.alpha == REFUSED and any(each.code in TRANSPARENT for each in examined.findings)


def _left_out(finding: Finding, recipe: Recipe, owners: Mapping[str, int]) -> bool:
    return finding.code in UNSAID and recipe.caption_of(owners.get(finding.path, 0)).missing == "reject"


def _mask_check(recipe: Recipe) -> Check:
    """A check for pictures without a mask, if the recipe's family inpaints."""
    family = family_of(recipe.model)
    if family is None or family.inpainting is None:
        return nothing_else

    def check(item: Item, examined: Examined) -> Iterable[Finding]:
        transparent = any(each.code in TRANSPARENT for each in examined.findings)
        lacking = mask_lacking(recipe, item, has_alpha=transparent)
        return () if lacking is None else (lacking,)

    return check


def _token_check(model: str, recipe: Recipe) -> Check:
    """A check that warns of items with a caption, in any of its variants, that a text encoder does not read whole."""
    reading = reading_of(model, recipe)
    with defer_interrupts():  # it loads transformers
        finder = reading.finder()

    def check(item: Item, examined: Examined) -> Iterable[Finding]:
        captions = [text for text, _ in captions_of(examined.captions, recipe.caption_of(item.source))]
        for code, detail in over_limit(finder.find(captions)):
            yield finding(item.label, code, detail)

    return check


def _previews(names: Sequence[str], blobs: Mapping[str, Blob], jobs: int) -> dict[str, bytes]:
    """A small JPEG of each picture, by name; `jobs` workers make them, since only workers decode pictures."""
    def preview(name: str) -> bytes:
        try:
            message = PreviewMessage(BlobMessage.of(blobs[name], stop=workers.closed), SIDE)
            return next(iter(workers.ask(PREVIEW, message, LIMITS)), b"")
        except WorkerLost:
            return b""

    with WorkerPool(SERVICE) as workers, ThreadPoolExecutor(jobs) as pool:
        try:
            return {name: data for name, data in zip(names, pool.map(preview, names), strict=True) if data}
        finally:
            workers.close()  # first: threads of the pool may wait for a worker
            pool.shutdown(cancel_futures=True)
