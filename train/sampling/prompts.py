"""Finds sample prompts and their text rows: the manifest's prompts, or those of an edited prompt file that are cached.

A prompt without a row raises no error, so training continues: it is skipped with a warning that names its line and the
command that encodes it. An untrusted manifest may name any file on this machine, so messages never quote the file:
warnings name lines, and a prompt's text is shown only if the cache has its row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prep.cache.ledger.ledger import Ledger, ledger_at_hand
from prep.cache.records import RowRef
from prep.digest import digest_bytes
from prep.errors import CacheError, ConfigError, PathError, Problem
from prep.formatting import counted, printable
from prep.fs.paths import is_inside, resolve
from prep.fs.untrusted import read_regular
from prep.keys import MaskedLatentKeys, MaskKeys, negative_key, text_key, unconditional_key
from prep.loader.index import Index
from prep.manifest.commands import prompts_command
from prep.manifest.consistency import reference_sizes, seen_ways
from prep.manifest.document import Manifest
from prep.manifest.samples import ShownPicture, shown_in
from prep.models.families.registry import FAMILIES
from prep.models.family import TextArrays
from prep.recipe.prompts import Prompt, PromptSettings, prompts_of, read_prompt_file, read_prompts

if TYPE_CHECKING:
    from torch import Tensor

WARNINGS = 20  # for single prompts; the rest are counted
MOST_CAPTIONS = 4  # used as prompts
_FILE = Path("prompts.txt")
MOST_PICTURE = 1 << 30  # bytes of a file that a prompt names


Kept = Callable[[Iterable[str]], Mapping[str, TextArrays]]  # text rows by their keys, as far as there are any


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """A prompt that can be sampled without a text encoder: places in the cache, or text rows `[1, …]` by array."""

    prompt: str
    positive: RowRef | TextArrays
    negative: RowRef | TextArrays
    settings: PromptSettings = field(default_factory=PromptSettings)
    # Latents of pictures that are conditions: places in the cache, or as they are stored, [1, C, h, w] each.
    references: tuple[RowRef | Tensor, ...] = ()
    target: RowRef | None = None  # the latent of the sample whose caption and references these are
    inpaint_mask: RowRef | None = None  # what is painted of its one reference; None: the family does not inpaint


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentPrompts:
    """Prompts, and warnings about skipped prompts."""

    prompts: tuple[PromptRows, ...]
    warnings: tuple[str, ...] = ()
    lacking: Mapping[str, tuple[str, bool]] = field(default_factory=dict)  # key → text without a row, and if a negative


def cached(index: Index) -> tuple[PromptRows, ...]:
    """The prompts encoded with the manifest, or a few captions if it has no prompts and no prompt file."""
    samples = index.manifest.document["prompts"]["samples"]
    if not samples and index.manifest.document["prompts"]["file"] is None:
        return of_captions(index)[0]
    return tuple(PromptRows(prompt=each["prompt"], positive=index.ref(**each["positive"]),
                            negative=index.ref(**each["negative_row"]), references=tuple(
                                index.ref(reference["shard"], reference["row"])
                                for reference in each.get("references", ())),
                            inpaint_mask=_mask_of(index, each.get("references", ())),
                            settings=PromptSettings.of_document(each.get("settings", {}))) for each in samples)


def _mask_of(index: Index, references: Sequence[Mapping[str, Any]]) -> RowRef | None:
    """What is painted of the reference of a prompt in a manifest. Raises `CacheError`."""
    if not index.inpaints or not references:
        return None
    own = references[0].get("mask")
    return (index.mask_beside(references[0]["shard"], references[0]["row"]) if own is None else
            index.ref(own["shard"], own["row"]))


def places_of(index: Index, texts: Iterable[str], setting: str) -> tuple[RowRef, ...]:
    """The places of the rows of prompts that were encoded with the manifest, as `setting` names them; "" is no prompt.
    Raises `ConfigError` for another, and for a family whose text rows also hold references."""
    if index.seeing:
        raise ConfigError(f"{setting} names prompts, which have no rows of their own where text also shows references",
                          hint=f"leave {setting} out of the settings")
    encoded = {each["prompt"]: each["positive"] for each in index.manifest.document["prompts"]["samples"]}
    encoded[""] = index.manifest.document["prompts"]["unconditional"]
    for text in texts:
        if text not in encoded:
            known = ", ".join(f"'{printable(each)}'" for each in [*encoded][:MOST_CAPTIONS] if each)
            raise ConfigError(f"{setting} has '{printable(text)}', expected \"\" or a prompt of the manifest"
                              f"{f': {known}' if known else ', which has none'}",
                              hint=f"write it into a file of prompts, and {prompts_command(index.manifest, _FILE)}")
    return tuple(index.ref(**encoded[text]) for text in texts)


def of_captions(index: Index) -> tuple[tuple[PromptRows, ...], str]:
    """Up to four distinct captions as prompts, with the references of their samples, and their role: "validation", or
    "training" if no sample is held out."""
    texts, prompts = index.samples.texts, dict[tuple[str, tuple[RowRef, ...]], PromptRows]()
    held_out = any(len(members) for members in index.validation)
    for members in index.validation if held_out else index.training:
        for sample in members[: 16 * MOST_CAPTIONS].tolist():
            first = int(index.samples.text_offsets[sample])
            captions = index.samples.captions(sample)
            if captions and captions[0].strip() and len(prompts) < MOST_CAPTIONS:
                place = index.ref(int(texts["shard"][first]), int(texts["row"][first]))
                target, references = _pictures_of(index, sample)
                mask = index.mask_of(int(index.samples.view_offsets[sample])) if index.inpaints else None
                prompts.setdefault((captions[0], references), PromptRows(
                    prompt=captions[0], positive=place, negative=index.unconditional(sample), references=references,
                    target=target if references else None, inpaint_mask=mask))
    return tuple(prompts.values()), "validation" if held_out else "training"


def _pictures_of(index: Index, sample: int) -> tuple[RowRef, tuple[RowRef, ...]]:
    """The latent of a sample's first view, and those of its references, if they are conditions."""
    samples, view = index.samples, int(index.samples.view_offsets[sample])
    own = range(0) if index.paired else samples.references_of(sample, view)
    columns = samples.views, samples.references
    latents, references = (index.refs(columns[number]["latent_shard"][some], columns[number]["latent_row"][some])
                           for number, some in enumerate((slice(view, view + 1), slice(own.start, own.stop))))
    return latents[0], tuple(references)


def current(index: Index, encoded: Kept | None = None) -> CurrentPrompts:
    """The current prompts of the prompt file, without its bad lines; the manifest's if the file is unchanged,
    unreadable, or has no cached prompt. `encoded`: rows that are not in the cache, by their keys."""
    named = index.manifest.document["prompts"]["file"]
    if named is None:
        return CurrentPrompts(prompts=cached(index))
    path = index.manifest.folder / named
    if _leads_out(index.manifest, named):
        return _of_manifest(index, f"prompt file {path} is a link out of the manifest's directory, so it is not read")
    try:
        edited = _edited(index.manifest, path)
    except Problem as error:
        return _of_manifest(index, error.message)
    if edited is None:
        return CurrentPrompts(prompts=cached(index))
    prompts, faults = edited
    bad = [f"{fault.message}; the line is skipped" for fault in faults[:WARNINGS]]
    if len(faults) > WARNINGS:
        bad.append(f"{len(faults) - WARNINGS} more lines of {path} are skipped")
    if not prompts:
        result = _of_manifest(index, f"prompt file {path} has no {'other ' if bad else ''}prompts")
    else:
        result = look_up(index, prompts, path, encoded)
    return replace(result, prompts=result.prompts or cached(index), warnings=(*bad, *result.warnings))


def bad_lines(index: Index) -> list[ConfigError]:
    """The errors in the lines of a prompt file that was edited since `prep encode`, for one who is there to correct
    them. A file that cannot be read is none of them: `current` warns of it."""
    named = index.manifest.document["prompts"]["file"]
    if named is None or _leads_out(index.manifest, named):
        return []
    try:
        edited = _edited(index.manifest, index.manifest.folder / named)
    except Problem:
        return []
    return [] if edited is None else edited[1]


def _edited(manifest: Manifest, path: Path) -> tuple[list[Prompt], list[ConfigError]] | None:
    """The prompts in the manifest's prompt file at `path`, and its bad lines; `None` if it is unchanged. Raises
    `PathError`."""
    if manifest.in_store and not path.exists():  # a store has no prompt file to edit
        return None
    by = f"prompts.file in {manifest.path}"
    data = read_prompt_file(path, by)
    return None if digest_bytes(data) == manifest.document["prompts"]["digest"] else (
        prompts_of(data, path, by, echo=False))


def of_file(index: Index, path: Path, option: str, encoded: Kept | None = None, *, typed: str = "") -> CurrentPrompts:
    """The prompts of the file at `path` that have rows, as `look_up`. `option` names the file, and `typed` is how a
    prompt can be given without one, for hints. Raises `PathError`, `ConfigError`; `CacheError` if none has."""
    _, prompts = read_prompts(path, option)
    if not prompts:
        raise PathError(f"prompt file {path} has no prompts",
                        hint="write one on each line" + (f", or give one with {typed}" if typed else ""))
    rows = look_up(index, prompts, path, encoded)
    if not rows.prompts:
        raise CacheError(f"the cache has no text row of any prompt in {path}",
                         hint=how_to_store(index, path, typed) + _back(index, path))
    return rows


def of_manifest(index: Index, encoded: Kept | None = None, *, typed: str = "") -> CurrentPrompts:
    """As `current`. Raises `CacheError` if there are none; `typed` as in `of_file`."""
    rows = current(index, encoded)
    if not rows.prompts:
        raise CacheError("the manifest has no sample prompts and no captions",
                         hint=how_to_store(index, _FILE, typed))
    return rows


def how_to_store(index: Index, path: Path, typed: str) -> str:
    """What stores the rows of the prompt file at `path`; or else what `typed` can give is encoded."""
    return (f"encode a prompt with {typed}, or " if typed else "") + (
        f"store the rows of a prompt file: {prompts_command(index.manifest, path)}")


def _back(index: Index, path: Path) -> str:
    """How a manifest has its own prompts again after those at `path` were stored; "" if these are its own."""
    named = index.manifest.document["prompts"]["file"]
    if named is None or (own := index.manifest.folder / named).resolve() == path.resolve():
        return ""
    return f"; these replace the manifest's prompts, and {prompts_command(index.manifest, own)} brings them back"


def look_up(index: Index, prompts: Iterable[Prompt], path: Path, encoded: Kept | None = None) -> CurrentPrompts:
    """The prompts of the file at `path` that have rows; warnings for the rest."""
    prompts, ledger = list(prompts), ledger_at_hand(index.cache)
    found = {prompt: references_of(index, prompt, path.parent) for prompt in prompts}
    texts = {prompt: texts_of(index, prompt, found[prompt], ledger) for prompt in prompts}
    wanted = {text.key: text for each in texts.values() for text in each}
    rows: dict[str, RowRef | TextArrays] = {key: ref for key in wanted if (ref := ledger.find(key))}
    rows[unconditional_key(index.manifest.fields["text"].context)] = index.unconditional()
    if encoded is not None:
        rows |= encoded([key for key, text in wanted.items() if key not in rows and not text.seeing])
    command = prompts_command(index.manifest, path)
    to_encode, references = f"; to encode it, run {command}", dict[Prompt, list[Encoded]]()
    lacks = dict[Prompt, str]()
    for prompt in prompts:
        if not all(text.key in rows for text in texts[prompt]):
            lacks[prompt] = f"no text row yet and is skipped{to_encode}"
        elif index.inpaints and not prompt.references:
            lacks[prompt] = "no picture to paint into and is skipped; --ref names one of the data set"
        elif (count := len(prompt.references)) > (most := most_references(index)):
            lacks[prompt] = f"{counted(count, 'reference')}, of which its model takes {most}, and is skipped"
        elif None in found[prompt]:
            lacks[prompt] = (f"a mask that is not encoded for its picture and is skipped{to_encode}" if prompt.mask else
                             f"a picture that is not of the data set and is skipped{to_encode}" if index.inpaints else
                             f"a reference that is not encoded and is skipped{to_encode}")
        else:
            references[prompt] = [each for each in found[prompt] if each is not None]
    complete = [PromptRows(prompt=prompt.text, positive=rows[texts[prompt][0].key], settings=prompt.settings,
                           negative=rows[texts[prompt][1].key],
                           references=tuple(each.latent for each in references[prompt]),
                           inpaint_mask=next((each.inpaint_mask for each in references[prompt]), None))
                for prompt in prompts if prompt in references]
    warnings = [f"the prompt in line {prompt.line} of {path} has {what}"
                for prompt, what in list(lacks.items())[:WARNINGS]]
    if len(lacks) > WARNINGS:
        warnings.append(f"{len(lacks) - WARNINGS} more prompts of {path} have rows that are not encoded yet")
    return CurrentPrompts(prompts=tuple(complete), warnings=tuple(warnings),
                          lacking={key: (text.words, text.negative) for key, text in wanted.items()
                                   if key not in rows and not text.seeing and text.words is not None})


def most_references(index: Index) -> int:
    """How many reference pictures the manifest's model takes of a prompt."""
    return FAMILIES[index.manifest.family].most_references


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptText:
    """A text row of a prompt."""

    key: str
    words: str | None  # None: no prompt
    negative: bool
    seeing: bool  # whether it is of a text with pictures: none is encoded here


def texts_of(index: Index, prompt: Prompt, references: Sequence[Encoded | None], ledger: Ledger) -> list[PromptText]:
    """The text rows of a prompt, and of its negative; of the keys that they may have with transparent pictures, those
    that the cache has."""
    context = index.manifest.fields["text"].context
    ways = seen_ways(index.manifest, [each.shown for each in references if each is not None]) or [()]
    texts = []
    for words, negative in ((prompt.text, False), (prompt.negative, True)):
        keys = [unconditional_key(context, seen) if words is None else
                (negative_key if negative else text_key)(words, context, seen) for seen in ways]
        key = next((key for key in keys if ledger.find(key)), keys[0])
        texts.append(PromptText(key=key, words=words, negative=negative, seeing=bool(ways[0])))
    return texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A picture whose latent the cache has."""

    shown: ShownPicture
    latent: RowRef
    inpaint_mask: RowRef | None = None  # what is painted of it; None: the family does not inpaint


def references_of(index: Index, prompt: Prompt, folder: Path) -> list[Encoded | None]:
    """The pictures that a prompt names, relative to `folder`: of those that the manifest's prompts and samples have as
    references, told by their bytes; `None` for each other. No picture is decoded here."""
    if not prompt.references:
        return []
    known = {(each["picture"], each.get("mask", {}).get("digest", "")): Encoded(
        shown=shown_in(each), latent=index.ref(each["shard"], each["row"]), inpaint_mask=_mask_of(index, [each]))
             for sample in index.manifest.document["prompts"]["samples"] for each in sample.get("references", ())}
    mask = _digest(folder / prompt.mask) if prompt.mask else ""
    named = [(_digest(folder / name), mask) for name in prompt.references]
    if any(each not in known for each in named):
        samples = _shown_to_samples(index)
        known = {(digest, ""): each for digest, each in samples.items()} | known
        if prompt.mask:
            return [known.get((digest, mask)) or _under(index, samples.get(digest), mask) for digest, _ in named]
    return [None if prompt.mask and not mask else known.get(each) for each in named]


def _under(index: Index, picture: Encoded | None, mask: str) -> Encoded | None:
    """A picture of a sample under the mask with this digest, at the sample's size, if that was encoded."""
    if picture is None or not mask:
        return None
    contexts, (digest, _, placement) = index.manifest.fields, picture.shown
    ledger, color = ledger_at_hand(index.cache), index.manifest.document["latents"].get("alpha")
    masked = MaskedLatentKeys(contexts["latent"].context, contexts["mask"].context)
    latent = next((place for each in (None, *([] if color is None else [tuple(color)]))
                   if (place := ledger.find(masked.key(digest, mask, placement, each)))), None)
    own = ledger.find(MaskKeys(contexts["mask"].context).key(mask, placement))
    return None if latent is None or own is None else replace(picture, latent=latent, inpaint_mask=own)


def _digest(path: Path) -> str:
    """The digest of a picture; "" if it cannot be read."""
    with suppress(OSError, ValueError):  # ValueError: a path with a null byte
        return digest_bytes(read_regular(path, MOST_PICTURE))
    return ""


def _shown_to_samples(index: Index) -> dict[str, Encoded]:
    """All references of samples, as they are and not mirrored, by the digest of the picture."""
    samples, columns = index.samples, index.samples.references
    places = index.refs(columns["latent_shard"], columns["latent_row"])
    sizes = zip(*(columns[name].tolist() for name in ("width", "height")), strict=True)
    placements = [samples.reference_placement(number, (width, height)) for number, (width, height) in enumerate(
        reference_sizes(index.manifest, samples).tolist())]
    masks = [index.mask_of(number) if index.inpaints else None for number in range(len(places))]  # a view has one
    every = zip(samples.reference_digests, places, sizes, placements, masks, strict=True)
    return {digest: Encoded(shown=ShownPicture(digest, size, placement), latent=place, inpaint_mask=mask)
            for digest, place, size, placement, mask in every if not placement.flip}


def _of_manifest(index: Index, why: str) -> CurrentPrompts:
    return CurrentPrompts(prompts=cached(index), warnings=(f"{why}; using the manifest's prompts",))


def _leads_out(manifest: Manifest, named: str) -> bool:
    """Whether a path inside the manifest's directory leads out of it through a link.

    A path with `..` is allowed: it shows openly where it leads, such as to a folder of prompts beside the manifest's.
    """
    if Path(named).is_absolute() or Path(os.path.normpath(named)).parts[:1] == ("..",):
        return False
    try:
        return not is_inside(resolve(manifest.folder / named), resolve(manifest.folder))
    except Problem:  # a loop of links: reading the file reports it
        return False
