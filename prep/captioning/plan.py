"""Chooses the pictures to ask about: those without a caption, and those whose caption a model made by other means.

A person's caption stays: a file, a row of a table, an edit, also an edit of what a model wrote, or that word for word,
once a person accepted it. About a picture of which a person rejected what a model wrote, a model is asked anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prep.captioning.engine import Engine
from prep.captioning.template import TAGS, Wording
from prep.captions.options import CaptionOptions
from prep.captions.read import BadCaption, read_caption
from prep.dataset.edits.log import UndoEntry, UndoLog
from prep.dataset.edits.made import caption_entries, digest_at, first_made, is_rejected, rejections
from prep.dataset.edits.places import EditPlace, EditPlaces
from prep.dataset.edits.refused import Refused
from prep.dataset.facts import open_facts
from prep.dataset.ingest import KnownItem, ingest
from prep.digest import digest_json, digest_strings
from prep.findings import Finding
from prep.fs.blob import error_code
from prep.progress import DeferredTotal, Progress
from prep.recipe.schema import Recipe
from prep.sources.item import Item

MEANING = 1  # of a remembered answer; raised when a picture is prepared, or an answer read, in another way


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A picture that a model is asked about."""

    known: KnownItem
    place: EditPlace  # where its caption is written
    disk: str  # digest of what is there now
    prompts: tuple[str, ...]
    keys: tuple[str, ...]  # of the answers, in the memory
    how: str  # digest of all that decides the caption
    old: tuple[str, ...]  # captions that it has
    again: bool  # a person rejected what a model made, and nothing was written since
    rejected: int = 0  # how often that was
    tags: str = TAGS  # what a tagger said of it, if one is asked first


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionPlan:
    """What is to do."""

    asked: tuple[Asked, ...]
    kept: int  # pictures with a caption of a person
    made: int  # pictures whose caption was made by the same means
    pictures: int  # that can be used
    findings: tuple[Finding, ...]  # pictures that cannot


def survey(recipe: Recipe, *, jobs: int, progress: Progress) -> tuple[Sequence[KnownItem], tuple[Finding, ...]]:
    """The pictures of a recipe with their captions as they are on the disk, and why others cannot be used. Raises
    `PathError`, `ConfigError`."""
    facts = open_facts()
    try:
        with progress("reading", total := DeferredTotal(), "pictures") as tick:
            ingested = ingest(_as_stored(recipe), facts, jobs=jobs, tick=tick, total=total)
    finally:
        facts.close()
    return ingested.items, tuple(finding for finding in ingested.findings if finding.severity == "error")


def _as_stored(recipe: Recipe) -> Recipe:
    """The recipe without what changes captions, and without what refuses pictures for their masks or references."""
    plain = CaptionOptions(missing="empty", variants=1, keep_separator="")
    return replace(recipe, caption=plain, mask_resize="allow", missing_reference="none",
                   image=replace(recipe.image, crop="centre"),
                   sources=tuple(replace(source, caption=None, missing_reference="none") for source in recipe.sources))


def plan(items: Sequence[KnownItem], findings: Sequence[Finding], places: EditPlaces, log: UndoLog, engine: Engine,
         wording: Wording, *, side: int, alpha: str, replaced: bool,
         beside: Mapping[str, tuple[str, ...]]) -> CaptionPlan:
    """The pictures to ask about; `replaced`: also those with a caption of a person. Of those that share the place of
    their caption, the first. `beside`: captions by label, without any edit; needed if they decide new ones."""
    asked: dict[str, Asked] = {}
    count = same = 0
    kept = dict[str, str]()  # labels of pictures with a caption of a person, by its place
    faults, entries = list(findings), caption_entries(log.entries())
    for known in items:
        try:
            place = places.of(known.item, "caption")
            disk = digest_at(place, known.item)
            edits = entries.get(place.name, ())
            first = first_made(edits, disk)
            old = _old(known, first, log, beside) if wording.uses_old else ()
            one = _asked(known, place, disk, edits, old, engine, wording, side, alpha)
        except (Refused, BadCaption, OSError) as error:
            faults.append(_not_asked(known.item, error))
            continue
        if first is not None and one.how in {entry.how for entry in edits if entry.after == disk}:
            same += 1
        elif first is None and not replaced and not one.again and texts_of(known):
            kept[place.name] = known.item.label
            count += 1
        else:
            asked.setdefault(place.name, one)
    for name in kept.keys() & asked.keys():  # pictures with one name, of which a table has captions of some
        faults.append(Finding(path=asked.pop(name).known.item.label, code="not-captioned", severity="error",
                              detail=f"its caption would also be that of {kept[name]}, which a person wrote"))
    return CaptionPlan(asked=tuple(asked.values()), kept=count, made=same, pictures=len(items), findings=tuple(faults))


def _asked(known: KnownItem, place: EditPlace, disk: str, edits: Sequence[UndoEntry], old: tuple[str, ...],
           engine: Engine, wording: Wording, side: int, alpha: str) -> Asked:
    """Raises `BadCaption` for names that no caption can have."""
    prompts, rejected = wording.asked_of(known.item, old), rejections(edits, disk)
    keys = keys_of(known, prompts, engine, side, alpha, rejected)
    shape = wording.caption_of(known.item, old, "{}")  # the caption, but for what the model says
    return Asked(known=known, place=place, disk=disk, prompts=prompts, keys=keys, old=old, rejected=rejected,
                 how=digest_strings([*keys, shape, *wording.choices]), again=is_rejected(edits, disk))


def keys_of(known: KnownItem, prompts: Sequence[str], engine: Engine, side: int, alpha: str, rejected: int = 0
            ) -> tuple[str, ...]:
    """The names of an engine's answers to prompts on a picture, about which so many were rejected."""
    anew = {"rejected": rejected} if rejected else {}  # so that a rejected answer is not the remembered one
    return tuple(digest_json({"kind": "caption", "meaning": MEANING, "picture": known.picture, "side": side,
                              "alpha": alpha, "prompt": prompt, **anew, **engine.identity}) for prompt in prompts)


def _old(known: KnownItem, first: UndoEntry | None, log: UndoLog, beside: Mapping[str, tuple[str, ...]]
         ) -> tuple[str, ...]:
    """The captions that a picture had before any that models made. Raises `OSError`, `Refused`."""
    if first is None:
        return texts_of(known)
    if not first.before:  # there was no edit, but perhaps a caption beside the picture, or in a table
        return beside.get(known.item.label, ())
    try:
        return read_caption(log.content(first) or b"")
    except BadCaption:
        return ()


def texts_of(known: KnownItem) -> tuple[str, ...]:
    """The captions of a picture, without empty ones."""
    return tuple(text for text, _ in known.captions if text)


def _not_asked(item: Item, error: Refused | BadCaption | OSError) -> Finding:
    if isinstance(error, BadCaption):
        return Finding(path=item.label, code=error.code, severity="error",
                       detail=f"{error.detail}: from the names of its file or directory")
    if isinstance(error, Refused):
        return Finding(path=item.label, code="not-captioned", severity="error", detail=error.message)
    return Finding(path=item.label, code=error_code(error), severity="error",
                   detail=f"its caption cannot be read: {error.strerror or error}")
