"""Surveys items: reads every file once, computes its digest, parses its header or caption; decodes no pictures.

An unusable item becomes a finding. A run over unchanged files opens none of them and only looks up their stamps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import PurePosixPath

from prep.captions.options import CaptionOptions
from prep.captions.variants import captions_of, variants_of
from prep.dataset.facts import fact_kinds
from prep.dataset.listing import Listed, list_recipe
from prep.dataset.reading import FactReader, NotRead
from prep.errors import ConfigError
from prep.findings import Finding
from prep.formatting import format_size, join_names, printable_name
from prep.fs.blob import Blob, error_code, waits
from prep.fs.memo import Fact, Memo
from prep.geometry import Focus, Size
from prep.parse import Alpha, alpha_of
from prep.progress import DeferredTotal, Tick
from prep.recipe.schema import Recipe
from prep.sources.item import Item

FETCHERS = 32  # threads that read objects in stores, at least: they wait for answers
AHEAD = 1 << 12  # items that are read, or wait for a thread, before the first of them is done: each takes 1.3 kB
Ask = Callable[[Blob, str], Fact | None]  # file, kind of fact; `None`: not known
Failed = Callable[[Exception], object]  # why a file could not be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingested:
    """All usable items of a recipe in walking order, and findings on the others."""

    items: Sequence[KnownItem]
    findings: tuple[Finding, ...]
    masks: int = 0  # mask files found, also those of unusable pictures and those without a picture
    failed: bool = False  # whether a file could not be read, for a reason that may be gone in the next run


def ingest(recipe: Recipe, facts: Memo, *, jobs: int, tick: Tick = lambda _: None,
           total: DeferredTotal | None = None, listed: Listed | None = None) -> Ingested:
    """Surveys a recipe, whose sources are listed if they are not yet. Raises `PathError`, and `ConfigError` for missing
    captions under `missing = "stop"`."""
    facts.preload()
    walked = list_recipe(recipe, rehash=not facts.trust) if listed is None else listed
    findings = list(walked.findings)
    if any(map(waits, chain.from_iterable((item.picture, *item.references) for item in walked.items))):
        jobs = max(jobs, FETCHERS)
    if total is not None:
        total.count = len(walked.items)
    items: list[KnownItem] = []
    stopped: list[str] = []
    failures: list[Exception] = []
    known = ingest_items(walked.items, recipe, facts, jobs=jobs, failed=failures.append)
    for item, result in zip(walked.items, known, strict=True):
        tick(1)
        if isinstance(result, KnownItem):
            items.append(result)
        elif result.code == "missing-caption" and recipe.caption_of(item.source).missing == "stop":
            stopped.append(result.path)
        else:
            findings.append(result)
    if stopped:
        _raise_missing(stopped, [finding for finding in findings if finding.code == "bad-table"])
    masks = (sum(item.mask is not None for item in walked.items)
             + sum(finding.code == "orphan-mask" for finding in findings))
    return Ingested(items=tuple(items), findings=tuple(findings), masks=masks, failed=bool(failures))


def ingest_items(items: Iterable[Item], recipe: Recipe, facts: Memo, *, jobs: int,
                 failed: Failed = lambda _: None) -> Iterator[KnownItem | Finding]:
    """Yields surveyed items, or why they cannot be used, in order; items with files to read use threads, which would
    not speed up the others. `failed` is told why a file could not be read."""
    waiting: deque[KnownItem | Finding | Future[KnownItem | Finding]] = deque()
    called = fact_kinds()

    def get(blob: Blob, kind: str) -> Fact | None:
        return facts.get(blob, called[kind])

    def read(blob: Blob, kind: str) -> Fact | None:
        return facts.get_or_read(blob, called[kind], partial(reader.read, kind), stop=reader.closed)

    pool, reader = ThreadPoolExecutor(jobs), FactReader()
    try:
        for item in items:
            known = _ingest_item(item, recipe, get, failed)
            waiting.append(pool.submit(_read_item, item, recipe, read, failed) if known is None else known)
            while waiting and (not isinstance(pending := waiting[0], Future) or pending.done() or len(waiting) > AHEAD):
                waiting.popleft()
                yield pending.result() if isinstance(pending, Future) else pending
        for pending in waiting:
            yield pending.result() if isinstance(pending, Future) else pending
    finally:
        reader.close()  # first, since threads wait for answers, also those of stores
        pool.shutdown(cancel_futures=True)


def _read_item(item: Item, recipe: Recipe, ask: Ask, failed: Failed) -> KnownItem | Finding:
    try:
        result = _ingest_item(item, recipe, ask, failed)
    except MemoryError as error:  # not remembered: another machine, or the next run, may have enough
        failed(error)
        return _reject(item, "too-large", "its files take more memory than there is")
    assert result is not None, "facts that are not remembered are read"
    return result


def _ingest_item(item: Item, recipe: Recipe, ask: Ask, failed: Failed) -> KnownItem | Finding | None:
    """The surveyed item, or the reason why it cannot be used; `None` if `ask` does not know one of its files."""
    what: tuple[str, Blob | None] = "", None  # the file being read, if it is not the picture
    mask: Fact | None = None
    try:
        focused = recipe.image.crop == "focus"
        header = ask(item.picture, "picture-alpha" if focused and recipe.mask_of(item.source) == "alpha" else "picture")
        if header is None:
            return None
        if (fault := fault_of(header, alpha_of(recipe.image.alpha))) is not None:
            return _reject(item, *fault)
        references = _references(item, recipe, ask)
        if not isinstance(references, tuple):
            return references
        what = "caption", item.caption
        words = ({"captions": list(item.captions)} if item.caption is None else
                 ask(item.caption, "caption" if item.caption_format == "text" else "caption-json"))
        if words is None:
            return None
        if "code" in words:
            return _reject(item, str(words["code"]), str(words["detail"]))
        what = "mask", item.mask
        if item.mask is not None and (mask := _ask_mask(item.mask, recipe, ask)) is None:
            return None
        if mask and mask.get("size") not in (None, [header["width"], header["height"]]):
            return _reject(item, "mask-size-mismatch", f'mask has {format_size(mask["size"])} pixels, '
                           f'expected {header["width"]}x{header["height"]}, since [mask] resize is "reject"')
    except NotRead as error:
        failed(error)
        return _reject(item, error.code, f"{_its(*what)}{error.detail}")
    except OSError as error:
        failed(error)
        return _reject(item, error_code(error), f"{_its(*what)}cannot be read: {error.strerror or error}")
    choice = recipe.caption_of(item.source)
    texts = captions_of(words["captions"], choice) or _without_caption(item, choice)
    if texts is None:
        return _reject(item, "missing-caption", item.uncaptioned or "has no caption, or an empty one")
    return KnownItem(item=item, picture=header["digest"], size=_shared_size(header["width"], header["height"]),
                     has_alpha=header["alpha"], captions=texts, mask=None if mask is None else mask["digest"],
                     focus=_focus(mask or header), cut="cut" in header, references=references)


@lru_cache(maxsize=1 << 14)
def _shared_size(width: int, height: int) -> Size:
    """The size, as one object for many pictures: of a set's pictures, few have sizes of their own."""
    return width, height


def _ask_mask(blob: Blob, recipe: Recipe, ask: Ask) -> Fact | None:
    """The facts needed of a mask file; with its size only if that decides whether it is used."""
    fact = ask(blob, "mask" if recipe.image.crop == "focus" else "file")
    size = ask(blob, "mask-size") if recipe.mask_resize == "reject" else {}
    return None if fact is None or size is None else {**fact, **size}


def fault_of(fact: Fact, alpha: Alpha | None) -> tuple[str, str] | None:
    """Why a picture or a reference with these facts cannot be used: the code of a finding, and its detail. `alpha`:
    what becomes of transparency; `None`: it is refused."""
    if "code" in fact:
        return str(fact["code"]), str(fact["detail"])
    if fact["alpha"] and alpha is None:
        return "has-alpha", 'has transparency, and [image] alpha is "reject"'
    return None


def _references(item: Item, recipe: Recipe, ask: Ask) -> tuple[KnownReference, ...] | Finding | None:
    """An item's references, or why it cannot be used with them; `None` if `ask` does not know one. Raises `NotRead`."""
    if item.unreferenced:
        return _reject(item, "missing-reference", item.unreferenced)
    known = []
    for blob in item.references:
        its = f"its reference {item.name_of(blob)}"
        try:
            fact = ask(blob, "picture")
        except NotRead as error:
            raise NotRead(error.code, f"{its} {error.detail}") from None
        except OSError as error:
            raise NotRead(error_code(error), f"{its} cannot be read: {error.strerror or error}") from None
        if fact is None:
            return None
        if (fault := fault_of(fact, alpha_of(recipe.image.alpha))) is not None:
            return _reject(item, fault[0], f"{its}: {fault[1]}")
        known.append(KnownReference.of(blob, fact))
    return tuple(known)


def _focus(fact: Fact) -> Focus | None:
    """The place of the mask, from the facts of a mask or of a picture with transparency."""
    at = fact.get("focus")
    return None if at is None else (at[0], at[1])


def _its(what: str, blob: Blob | None) -> str:
    """Names an item's file at the start of a message; empty for the picture."""
    return "" if blob is None else f"its {what} {printable_name(blob.name)} "


def _without_caption(item: Item, choice: CaptionOptions) -> tuple[tuple[str, float], ...] | None:
    """The captions that the recipe's policy gives an item without one; `None` if it rejects such items."""
    if choice.missing in ("stop", "reject"):
        return None
    words = {"empty": "", "constant": choice.constant, "filename": caption_from_name(item.name)}[choice.missing]
    return variants_of([words], choice)


def caption_from_name(name: str) -> str:
    """A file name as a caption: the stem, `_` and `-` as spaces."""
    return words_of(PurePosixPath(name).stem)


def words_of(name: str) -> str:
    """A name with `_` and `-` as spaces."""
    return " ".join(name.replace("_", " ").replace("-", " ").split())


def _reject(item: Item, code: str, detail: str) -> Finding:
    return Finding(path=item.label, code=code, severity="error", detail=detail)


def _raise_missing(names: list[str], tables: list[Finding]) -> None:
    why = f"; {tables[0].path}: {tables[0].detail}" if tables else ""
    raise ConfigError(f"pictures without a caption ({len(names)}): {join_names(names, 8)}{why}",
                      hint="write them, make them with prep caption, or choose --missing-caption reject, empty, "
                      "filename or constant")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownItem:
    """An item whose bytes were digested and whose header was read: all that keys and buckets need."""

    item: Item
    picture: str  # SHA-256 of the picture's bytes
    size: Size  # pixels, after EXIF orientation
    has_alpha: bool
    captions: tuple[tuple[str, float], ...]  # final texts and their weights, at least one
    mask: str | None  # SHA-256 of the mask file's bytes
    focus: Focus | None = None  # where its mask is, for `crop = "focus"`
    cut: bool = False  # whether its file seems to lack its end
    references: tuple[KnownReference, ...] = ()  # in the order of the item's


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownReference:
    """A reference picture whose bytes were digested and whose header was read."""

    blob: Blob
    picture: str  # SHA-256 of its bytes
    size: Size  # pixels, after EXIF orientation
    has_alpha: bool

    @classmethod
    def of(cls, blob: Blob, fact: Fact) -> KnownReference:
        """The reference in `blob`, by the facts of its picture."""
        return cls(blob=blob, picture=fact["digest"], size=_shared_size(fact["width"], fact["height"]),
                   has_alpha=fact["alpha"])
