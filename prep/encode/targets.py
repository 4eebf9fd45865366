"""Computes the targets of a recipe: samples with the keys of their rows, and for each key the work that makes its row.

Pure: computed from surveyed items, buckets and contexts, without touching files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from prep.arrays import DType
from prep.buckets.assign import Assignments
from prep.cache.records import Reject
from prep.dataset.ingest import Ingested, KnownItem, KnownReference
from prep.dataset.prompt_references import NO_REFERENCES, NamedMask, PromptReference, PromptReferences
from prep.dataset.samples import PlacedItem, dataset_notes, placed_items, reference_name, roles_of
from prep.errors import ConfigError
from prep.findings import Finding
from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.fs.memo import Memo
from prep.fs.place import Place
from prep.geometry import Placement, Size, cover
from prep.keys import ImportedLatentKeys, LatentKeys, MaskedLatentKeys, MaskKeys, SeenPicture, TextKeys, drawn_origin
from prep.manifest.samples import NO_PROMPT, Reference, ReferenceMask, Sample, Samples, Text, View
from prep.models.families.registry import FAMILIES
from prep.models.family import Family, Vision
from prep.parse import Alpha, alpha_of, color_below
from prep.recipe.prompts import Prompt, PromptSettings
from prep.recipe.schema import Recipe

EncodedRow = Mapping[str, np.ndarray[Any, Any]]  # array name → one row, bfloat16 as uint16
Made = EncodedRow | Reject | Finding  # a row; a permanent failure; a failure of this run


@dataclass(frozen=True, kw_only=True, slots=True)
class Painted:
    """What prompts may be painted into."""

    pictures: Mapping[str, Reference]  # masked ones of samples, as they are and not mirrored, by the picture's digest
    buckets: Sequence[Size]  # for others, to which prompts give masks


class PictureTarget(NamedTuple):
    """A latent or mask row to encode from a file, or for it."""

    key: str
    name: str  # label of an item that uses it, for findings
    file: str  # the blob's name in messages
    blob: Blob
    digest: str  # the blob's bytes must still match it
    placement: Placement
    mask_from: Literal["mask", "alpha", "drawn"] = "mask"  # of a mask: its file, a picture's transparency, or chance
    hole: PictureTarget | None = None  # the mask of what is cut out of the picture before it is encoded; None: nothing

    @property
    def origin(self) -> str:
        """What a mask is made from, as its key has it."""
        return drawn_origin(self.digest) if self.mask_from == "drawn" else self.digest


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTarget:
    """A text row to encode; caption `None` is the unconditional row."""

    key: str
    caption: str | None
    negative: bool = False  # whether it is a negative prompt whose row differs from that of the same caption
    pictures: tuple[PictureTarget, ...] = ()  # those that the text encoder sees beside it; their key is that of the row


class PictureTargets(Mapping[str, PictureTarget]):
    """Latent or mask rows to encode, by key. Those of samples' own pictures are made into records when asked for: each
    takes 210 bytes, and a record with its path, file and digest 420."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Any, ...] | PictureTarget] = {}
        self._folders: dict[str, str] = {}  # what many paths begin with, each to itself

    def add(self, target: PictureTarget) -> None:
        """Adds a target, unless there is one with its key."""
        if target.key in self._rows:
            return
        name, blob = target.name, target.blob
        if target.file != name or target.hole is not None:
            self._rows[target.key] = target
            return
        folder, end = blob.file, ""
        if folder.endswith(name):  # most of a path is a name that is there anyway
            folder, end = folder[: -len(name)], name
            folder = self._folders.setdefault(folder, folder)
        self._rows[target.key] = (name, folder, end, blob.offset, blob.length, blob.member, blob.version,
                                  target.placement, target.mask_from, bytes.fromhex(target.digest))

    def __getitem__(self, key: str) -> PictureTarget:
        row = self._rows[key]
        if isinstance(row, PictureTarget):
            return row
        name, folder, end, offset, length, member, version, placement, mask_from, digest = row
        blob = Blob(file=folder + end, offset=offset, length=length, member=member, version=version)
        return PictureTarget(key=key, name=name, file=name, blob=blob, digest=digest.hex(), placement=placement,
                             mask_from=mask_from)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class TextTargets(Mapping[str, TextTarget]):
    """Text rows to encode, by key. Most have a caption and nothing else, and are made into a record when asked for."""

    def __init__(self) -> None:
        self._captions: dict[str, str | TextTarget | None] = {}

    def add(self, target: TextTarget) -> None:
        """Adds a target, in place of one with its key."""
        plain = not (target.negative or target.pictures)
        self._captions[target.key] = target.caption if plain else target

    def __getitem__(self, key: str) -> TextTarget:
        known = self._captions[key]
        return known if isinstance(known, TextTarget) else TextTarget(key=key, caption=known)

    def __contains__(self, key: object) -> bool:
        return key in self._captions

    def __iter__(self) -> Iterator[str]:
        return iter(self._captions)

    def __len__(self) -> int:
        return len(self._captions)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTarget:
    """A sample prompt and the keys of its two rows."""

    prompt: str
    negative: str | None  # None: the unconditional row
    positive_key: str
    negative_key: str
    settings: PromptSettings  # of its pictures; not part of the keys
    references: tuple[Reference, ...] = ()

    @property
    def keys(self) -> list[str]:
        """The keys of all its rows."""
        masks = (reference.mask.key for reference in self.references if reference.mask is not None)
        return [self.positive_key, self.negative_key, *(reference.latent for reference in self.references), *masks]

    def as_document(self, row: Callable[[str], Mapping[str, int]]) -> dict[str, Any]:
        """Its entry in a manifest; `row` says where the row of a key is. A prompt without settings or references has no
        such key."""
        settings = self.settings.as_document()
        references = [{**reference.as_document(), **row(reference.latent),
                       **({} if (mask := reference.mask) is None else
                          {"mask": {"name": mask.name, "digest": mask.digest, **row(mask.key)}})}
                      for reference in self.references]
        return {"prompt": self.prompt, "negative": self.negative, **({"settings": settings} if settings else {}),
                **({"references": references} if references else {}),
                "positive": row(self.positive_key), "negative_row": row(self.negative_key)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contexts:
    """The key contexts of the fields; `mask` is `None` if the recipe has no masks."""

    latent: Mapping[str, Any]
    mask: Mapping[str, Any] | None
    text: Mapping[str, Any]

    def by_field(self) -> dict[str, Mapping[str, Any]]:
        """Context by field name, without fields that have none."""
        named = {"latent": self.latent, "mask": self.mask, "text": self.text}
        return {name: context for name, context in named.items() if context is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """The samples, prompts and rows that the manifest will need."""

    samples: Samples
    labels: tuple[str, ...]  # names of the samples in findings, in the same order
    prompts: tuple[PromptTarget, ...]
    unconditional: str  # key
    latents: Mapping[str, PictureTarget]
    masks: Mapping[str, PictureTarget]
    texts: Mapping[str, TextTarget]
    findings: tuple[Finding, ...]
    notices: tuple[str, ...] = field(default=())

    def bucket_of(self, field: str, key: str) -> Size | None:
        """The bucket of a latent or mask row; text has none."""
        targets = {"latent": self.latents, "mask": self.masks}.get(field, {})
        return targets[key].placement.bucket if key in targets else None

    def rows_by_field(self) -> dict[str, Mapping[str, PictureTarget] | Mapping[str, TextTarget]]:
        """The targets of each field, by key."""
        return {"latent": self.latents, "mask": self.masks, "text": self.texts}

    def by_field(self) -> dict[str, list[str]]:
        """The wanted keys of each field, sorted."""
        return {field: sorted(rows) for field, rows in self.rows_by_field().items()}

    @property
    def rows(self) -> int:
        """How many rows are wanted."""
        return len(self.latents) + len(self.masks) + len(self.texts)

    def keys(self) -> list[str]:
        """All wanted keys, sorted."""
        return sorted([*self.latents, *self.masks, *self.texts])


def by_first_sample(samples: Iterable[Sample], field: str, keys: Iterable[str]) -> list[str]:
    """Wanted keys of a field in the order of the first of `samples` that have them; then those of prompts, sorted."""
    missing = set(keys)
    ordered: list[str] = []
    for sample in samples if missing else ():
        own = sample.keys(field)
        for key in own:
            if key in missing:
                missing.remove(key)
                ordered.append(key)
    return ordered + sorted(missing)


class LatentRows(Protocol):
    """Makes rows of latents without a VAE. It can be sent to other processes."""

    def row(self, target: PictureTarget) -> Made:
        """The row of a target, or why there is none."""


class LatentSource(Protocol):
    """Latents that another program made of a recipe's pictures."""

    def context(self, usual: Mapping[str, Any]) -> dict[str, Any]:
        """The key context of its rows, from that of rows that the VAE makes."""

    def place(self, recipe: Recipe, surveyed: Ingested, family: Family, facts: Memo, jobs: int
              ) -> tuple[Ingested, Assignments, tuple[str, ...]]:
        """The pictures that have latents, and their buckets; other pictures become findings. With notes."""

    def target(self, item: KnownItem, placement: Placement, keys: ImportedLatentKeys) -> PictureTarget:
        """The target of a placed picture's latent."""

    def rows(self, family: Family, dtype: DType, latents: Mapping[str, Any]) -> LatentRows:
        """What makes the rows; `latents` says how the model's VAE has them normalized."""

    def described(self) -> dict[str, Any]:
        """What the manifest says of it."""


def targets_of(recipe: Recipe, survey: Ingested, bucketing: Assignments, contexts: Contexts,
               prompts: Sequence[Prompt], latents_from: LatentSource | None = None,
               prompt_references: PromptReferences = NO_REFERENCES) -> Targets:
    """The targets of a recipe; `bucketing` numbers its items in the survey's order.

    A survey's list of items is emptied, of a recipe with one resolution while its samples are made: both together would
    take half as much memory again.
    """
    roles, notices = roles_of(recipe, survey.items)[0], dataset_notes(recipe, survey, bucketing)
    items = survey.items if isinstance(survey.items, list) else None
    once = len(bucketing.rules) == 1  # each item makes at most one sample
    keys = _Keys.of(recipe, contexts, latents_from)
    samples, labels = Samples(), list[str]()
    latents, masks, texts = PictureTargets(), PictureTargets(), TextTargets()
    by_source = [keys.of_source(recipe, number) for number in range(len(recipe.sources))]
    for seat in placed_items(recipe, survey.items, roles, bucketing, taken_from=items if once else None):
        source = seat.item.item.source
        views = _views(seat, recipe.sources[source].path, by_source[source], latents, masks)
        samples.add(_sample(seat, recipe, views, keys, texts))
        labels.append(seat.item.item.label)
    if items is not None:
        items.clear()
    rows, shown, under = _of_prompts(prompts, prompt_references, keys, texts, painted_in(samples, prompt_references))
    for all_rows, own in ((latents, shown), (masks, under)):
        for target in own.values():
            all_rows.add(target)
    return Targets(samples=samples, labels=tuple(labels), prompts=rows,
                   unconditional=keys.text.unconditional, latents=latents, masks=masks,
                   texts=texts,
                   findings=(*survey.findings, *bucketing.findings),
                   notices=notices)


def prompt_targets(prompts: Sequence[Prompt], references: PromptReferences, contexts: Contexts,
                   alpha: Alpha | None, family: Family, painted: Painted) -> Targets:
    """The targets of prompts alone, and of the unconditional row; `alpha`: what becomes of transparency. Of the
    pictures that are `painted` none is a target: the samples have them."""
    keys = _Keys(latent=LatentKeys(contexts.latent), text=TextKeys(contexts.text), origin=None, alpha=alpha,
                 imported=None, vision=family.text.vision, **_mask_keys(contexts, family))
    texts = TextTargets()
    rows, latents, masks = _of_prompts(prompts, references, keys, texts, painted)
    return Targets(samples=Samples(), labels=(), prompts=rows, unconditional=keys.text.unconditional, latents=latents,
                   masks=masks, texts=texts, findings=())


def _mask_keys(contexts: Contexts, family: Family) -> dict[str, Any]:
    """Of `_Keys`, those of masks and of what they hide."""
    mask = contexts.mask
    return {"mask": None if mask is None else MaskKeys(mask),
            "masked": None if mask is None or family.inpainting is None else MaskedLatentKeys(contexts.latent, mask)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keys:
    """Makes the keys of each field, from the item and the settings here."""

    latent: LatentKeys
    mask: MaskKeys | None
    text: TextKeys
    origin: str | None  # of masks: "file" or "alpha"; None: there are none
    alpha: Alpha | None  # what becomes of transparency; None: it is refused
    imported: tuple[LatentSource, ImportedLatentKeys] | None  # instead of `latent`
    vision: Vision | None  # how the text encoder sees references; None: it does not
    masked: MaskedLatentKeys | None  # None: the family does not inpaint
    draws: bool = False  # whether masks are drawn for pictures that have none

    @classmethod
    def of(cls, recipe: Recipe, contexts: Contexts, latents_from: LatentSource | None) -> _Keys:
        mask, family = contexts.mask, FAMILIES[recipe.model.family]
        return cls(latent=LatentKeys(contexts.latent), **_mask_keys(contexts, family),
                   imported=None if latents_from is None else (latents_from, ImportedLatentKeys(contexts.latent)),
                   text=TextKeys(contexts.text), origin=None if mask is None else mask["origin"],
                   alpha=alpha_of(recipe.image.alpha), vision=family.text.vision)

    def of_source(self, recipe: Recipe, source: int) -> _Keys:
        """The keys of a source's rows."""
        return replace(self, origin=None if recipe.mask_of(source) == "none" else self.origin,
                       draws=recipe.draws_mask(source))

    def seen(self, references: Iterable[tuple[KnownReference, Placement]], name: str) -> tuple[_Seen, ...]:
        """References, placed for the VAE, as the text encoder sees them."""
        if self.vision is None:
            return ()
        found = []
        for each, placed in references:
            placement = self.vision.place(each.size, placed)
            assert placement is not None, "what cannot be seen is no reference"
            picture = SeenPicture(picture=each.picture, placement=placement,
                                  alpha=color_below(self.alpha) if each.has_alpha else None)
            found.append(_Seen(picture, each, f"{name}: its reference {printable_name(each.blob.name)}"))
        return tuple(found)


def _views(seat: PlacedItem, source: Place, keys: _Keys, latents: PictureTargets, masks: PictureTargets
           ) -> tuple[View, ...]:
    """The views of a placed item of a source; adds the targets of their rows to `latents` and `masks`."""
    item, name, views = seat.item, seat.item.item.label, []
    known = item.references if seat.references and keys.masked is None else ()
    for placement, placed in zip(seat.views, seat.references or [()] * len(seat.views), strict=True):
        latent = _latent_work(item, placement, name, keys)
        mask = _mask_work(item, placement, name, keys)
        if mask is not None:
            masks.add(mask)
        if keys.masked is not None:
            assert mask is not None, "a picture without a mask has no place"
            works = [_masked_work(item, latent, mask, keys.masked, keys)]
            references: tuple[Reference, ...] = (Reference(
                name=item.item.name, picture=item.picture, size=item.size, placement=placement, latent=works[0].key),)
        else:
            works = [_reference_work(each, place, name, keys) for each, place in zip(known, placed, strict=True)]
            references = tuple(_reference(each, reference_name(item.item, each.blob, source), work)
                               for each, work in zip(known, works, strict=True))
        for work in (latent, *works):
            latents.add(work)
        views.append(View(placement=placement, latent=latent.key, mask=None if mask is None else mask.key,
                          references=references))
    return tuple(views)


def _masked_work(item: KnownItem, latent: PictureTarget, mask: PictureTarget, masked: MaskedLatentKeys, keys: _Keys
                 ) -> PictureTarget:
    """The target of the latent of a picture with a hole where its mask is white; the other two are theirs."""
    key = masked.key(item.picture, mask.origin, latent.placement, keys.alpha if item.has_alpha else None)
    return latent._replace(key=key, file=f"{latent.file}{_under(mask)}", hole=mask)


def _under(mask: PictureTarget) -> str:
    """What a message on a masked picture says of its mask, if that is a file."""
    return f", under its mask {printable_name(mask.blob.name)}," if mask.mask_from == "mask" else ""


def _latent_work(item: KnownItem, placement: Placement, name: str, keys: _Keys) -> PictureTarget:
    if keys.imported is not None:
        latents_from, own = keys.imported
        return latents_from.target(item, placement, own)
    key = keys.latent.key(item.picture, placement, keys.alpha if item.has_alpha else None)
    return PictureTarget(key=key, name=name, file=name, blob=item.item.picture, digest=item.picture,
                         placement=placement)


def _reference_work(reference: KnownReference, placement: Placement, name: str, keys: _Keys) -> PictureTarget:
    """The target of a reference's latent: the same row as if the picture were a sample's, placed so."""
    key = keys.latent.key(reference.picture, placement, keys.alpha if reference.has_alpha else None)
    return PictureTarget(key=key, name=name, file=f"{name}: its reference {printable_name(reference.blob.name)}",
                         blob=reference.blob, digest=reference.picture, placement=placement)


def _reference(known: KnownReference, name: str, work: PictureTarget) -> Reference:
    return Reference(name=name, picture=known.picture, size=known.size, placement=work.placement, latent=work.key)


def _mask_work(item: KnownItem, placement: Placement, name: str, keys: _Keys) -> PictureTarget | None:
    """The mask's target; `None` for a picture without a mask, which is read as all ones."""
    if keys.mask is None:
        return None
    own = PictureTarget(key="", name=name, file=name, blob=item.item.picture, digest=item.picture, placement=placement)
    if keys.origin == "alpha" and item.has_alpha:
        target = own._replace(mask_from="alpha")
    elif keys.origin == "file" and item.item.mask is not None and item.mask is not None:
        blob = item.item.mask
        target = own._replace(file=f"{name}: its mask {printable_name(blob.name)}", blob=blob, digest=item.mask)
    elif keys.draws:
        target = own._replace(mask_from="drawn")
    else:
        return None
    return target._replace(key=keys.mask.key(target.origin, placement))


@dataclass(frozen=True, slots=True)
class _Seen:
    """A reference as the text encoder sees it."""

    picture: SeenPicture
    known: KnownReference
    file: str  # in messages

    def target(self, key: str, name: str) -> PictureTarget:
        """Its pixels for the text row `key`."""
        return PictureTarget(key=key, name=name, file=self.file, blob=self.known.blob, digest=self.known.picture,
                             placement=self.picture.placement)


def _sample(seat: PlacedItem, recipe: Recipe, views: tuple[View, ...], keys: _Keys,
            targets: TextTargets) -> Sample:
    """The sample of a placed item; adds the targets of its text rows."""
    item, name, source = seat.item, seat.item.item.label, recipe.sources[seat.item.item.source]
    seen = keys.seen(zip(item.references, seat.references[0], strict=True) if item.references else (), name)
    texts = tuple(Text(caption=caption, weight=weight, key=_add(targets, keys.text, caption, seen, name))
                  for caption, weight in item.captions)
    if seen:
        texts += (Text(caption=NO_PROMPT, weight=0.0, key=_add(targets, keys.text, None, seen, name)),)
    return Sample(id=seat.id, name=item.item.name, source=item.item.source, role=seat.role, picture=item.picture,
                  size=item.size, bucket=seat.bucket, views=views, texts=texts, repeats=seat.repeats,
                  weight=source.weight)


def _add(targets: TextTargets, keys: TextKeys, caption: str | None, seen: Sequence[_Seen], name: str, *,
         negative: bool = False) -> str:
    """The key of a text row, whose target is added; caption `None`: no prompt."""
    pictures = [each.picture for each in seen]
    if caption is None:
        key = keys.without_prompt(pictures) if pictures else keys.unconditional
    else:
        key = keys.negative(caption, pictures) if negative else keys.key(caption, pictures)
    if key not in targets:
        own = negative and caption is not None and key != keys.key(caption, pictures)
        targets.add(TextTarget(key=key, caption=caption, negative=own,
                               pictures=tuple(each.target(key, name) for each in seen)))
    return key


def painted_in(samples: Samples, references: PromptReferences) -> Painted:
    """The masked pictures of samples that prompts name, as they are and not mirrored."""
    wanted = {each.known.picture for each in references.values() if each.placement is None}
    if not wanted:
        return Painted(pictures={}, buckets=())
    pictures = {reference.picture: reference for sample in samples if sample.picture in wanted
                for view in sample.views for reference in view.references if not view.placement.flip}
    return Painted(pictures=pictures, buckets=sorted({size for size, _ in samples.shapes}))


_Works = dict[str, PictureTarget]


def _of_prompts(prompts: Sequence[Prompt], references: PromptReferences, keys: _Keys, texts: TextTargets,
                painted: Painted) -> tuple[tuple[PromptTarget, ...], _Works, _Works]:
    """The targets of prompts, and those of the pictures and of the masks that they name, by key; adds those of their
    text rows, and of the unconditional row. Raises `ConfigError` for a picture to paint into that is not `painted`."""
    works: list[PictureTarget] = []
    shown: dict[tuple[str, str], Reference] = {}
    for named, each in references.items():
        if each.mask is not None:
            works.append(_prompt_work(each, each.mask, painted, keys))
            shown[named] = _under_mask(each, each.mask, works[-1])
        elif each.placement is None:
            shown[named] = _to_paint(each, painted)
        else:
            works.append(_reference_work(each.known, each.placement,
                                         f"reference of the prompt in line {each.line}", keys))
            shown[named] = _reference(each.known, each.name, works[-1])
    rows = []
    for prompt in prompts:
        name = f"reference of the prompt in line {prompt.line}"
        seen = keys.seen([(references[each].known, shown[each].placement) for each in prompt.pictures], name)
        rows.append(PromptTarget(
            prompt=prompt.text, negative=prompt.negative, settings=prompt.settings,
            positive_key=_add(texts, keys.text, prompt.text, seen, name),
            negative_key=_add(texts, keys.text, prompt.negative, seen, name, negative=True),
            references=tuple(shown[each] for each in prompt.pictures)))
    _add(texts, keys.text, None, (), "")
    return (tuple(rows), {work.key: work for work in works},
            {work.hole.key: work.hole for work in works if work.hole is not None})


def _prompt_work(named: PromptReference, own: NamedMask, painted: Painted, keys: _Keys) -> PictureTarget:
    """The target of a picture's latent under the mask that a prompt gives it, at the size of its sample, or else in the
    bucket that is most of its shape."""
    known, name = named.known, f"picture of the prompt in line {named.line}"
    sample = painted.pictures.get(known.picture)
    placement = sample.placement if sample is not None else cover(known.size, _nearest(known.size, painted.buckets))
    assert keys.mask is not None and keys.masked is not None, "a family that inpaints has masks"
    mask = PictureTarget(key=keys.mask.key(own.digest, placement), name=name,
                         file=f"{name}: its mask {printable_name(own.blob.name)}", blob=own.blob, digest=own.digest,
                         placement=placement)
    key = keys.masked.key(known.picture, mask.origin, placement, keys.alpha if known.has_alpha else None)
    return PictureTarget(key=key, name=name, file=f"{name}: {printable_name(known.blob.name)}{_under(mask)}",
                         blob=known.blob, digest=known.picture, placement=placement, hole=mask)


def _nearest(size: Size, buckets: Sequence[Size]) -> Size:
    """The bucket nearest to the shape of a picture; of several the largest."""
    def apart(bucket: Size) -> tuple[Fraction, int]:
        sides = size[0] * bucket[1], size[1] * bucket[0]
        return Fraction(max(sides), min(sides)), -bucket[0] * bucket[1]

    return min(buckets, key=apart)


def _under_mask(named: PromptReference, own: NamedMask, work: PictureTarget) -> Reference:
    assert work.hole is not None, "a masked picture has a mask"
    return replace(_reference(named.known, named.name, work),
                   mask=ReferenceMask(name=own.name, digest=own.digest, key=work.hole.key))


def _to_paint(named: PromptReference, painted: Painted) -> Reference:
    found = painted.pictures.get(named.known.picture)
    if found is None:
        raise ConfigError(f"the prompt in line {named.line} names {printable_name(named.name)}, expected a picture of "
                          "the data set, whose mask says what is painted, or --mask",
                          hint='--mask MASK in the line paints into any picture; a source with role = "validation" '
                          "has pictures that are only drawn from")
    return replace(found, name=named.name)
