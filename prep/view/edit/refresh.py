"""Surveys again what an edit has changed: the pictures that share the caption or mask, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from prep.captions.read import BadCaption, examine_caption
from prep.dataset.edits.apply import CAPTION_END, edited_name
from prep.dataset.ingest import KnownItem, ingest_items
from prep.dataset.listing import walk_recipe
from prep.dataset.samples import settle_masks
from prep.errors import ConfigError
from prep.findings import CODES, Finding, finding
from prep.fs.blob import Blob, read_blob
from prep.fs.memo import Memo
from prep.progress import silent
from prep.sources.item import Item
from prep.view.source.survey import Survey, coverage_of, without_caption

# The findings that an edit may have changed; only a scan finds what is wrong with a mask.
STALE = {"caption": {"odd-length", *(code for code in CODES if "caption" in code and "orphan" not in code)},
         "mask": {code for code in CODES if "mask" in code and "orphan" not in code}}


def refreshed(survey: Survey, item: Item, kind: str, path: Path | None) -> Survey:
    """The survey after the caption or mask (`kind`) of an item was written to `path`, or its file removed (`None`)."""
    shared = edited_name(item.label, CAPTION_END)
    stem = shared.removesuffix(CAPTION_END)  # compared first, since there may be a million
    by_label = {known.item.label: known for known in survey.items
                if known.item.label.startswith(stem) and edited_name(known.item.label, CAPTION_END) == shared}
    facts = Memo(None)  # what was just written is not at rest
    again = _listed(survey, set(by_label)) if path is None else [
        _with(known.item, kind, path) for known in by_label.values()]
    read = {item.label: result for item, result in zip(again, ingest_items(again, survey.original, facts, jobs=1),
                                                       strict=True)}
    bad = [result for result in read.values() if isinstance(result, Finding)]
    items = tuple(known if new is None else new for known in survey.items
                  if not isinstance(new := read.get(known.item.label), Finding))
    recipe = survey.recipe
    with suppress(ConfigError):  # the last mask is gone, but crops need one: they stay as they were
        recipe = settle_masks(survey.original, items)
    renewed = [result for result in read.values() if isinstance(result, KnownItem)]
    coverage = {label: part for label, part in survey.coverage.items() if label not in by_label}
    coverage |= coverage_of(recipe, renewed, facts, jobs=1, progress=silent)
    findings = [finding for finding in survey.findings
                if finding.path not in by_label or finding.code not in STALE[kind]]
    notes = [note for item in renewed for note in _notes(item)] if kind == "caption" else []
    return replace(survey, recipe=recipe, items=items, coverage=coverage, rejected=survey.rejected + len(bad),
                   findings=(*findings, *bad, *notes))


def _with(item: Item, kind: str, path: Path) -> Item:
    blob = Blob(file=str(path))
    if kind == "mask":
        return replace(item, mask=blob)
    return replace(item, caption_at=blob, caption_format="text", captions=())


def _listed(survey: Survey, labels: set[str]) -> list[Item]:
    """The items with these labels, as they are found now."""
    return [item for item in walk_recipe(survey.original) if isinstance(item, Item) and item.label in labels]


def _notes(known: KnownItem) -> list[Finding]:
    """The findings of a scan on the captions."""
    item = known.item
    if item.caption is None:
        return list(without_caption([known]))
    try:
        notes = examine_caption(read_blob(item.caption), item.caption_format)[1]
    except (OSError, BadCaption):
        return []
    return [finding(item.label, code, detail) for code, detail in notes]
