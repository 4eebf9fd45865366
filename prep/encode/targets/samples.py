"""Computes the targets of a recipe, and those of its prompts.

Pure: computed from surveyed items, buckets and contexts, without touching files.
"""

from __future__ import annotations

from collections.abc import Sequence

from prep.buckets.assign import Assignments
from prep.dataset.ingest import Ingested, KnownItem
from prep.dataset.prompt_references import NO_REFERENCES, PromptReferences
from prep.dataset.samples import PlacedItem, dataset_notes, placed_items, reference_name, roles_of
from prep.encode.targets.keys import (
    RowKeys,
    add_text,
    embedding_target,
    reference_of,
    reference_target,
    under_its_mask,
)
from prep.encode.targets.prompts import painted_in, targets_of_prompts
from prep.encode.targets.records import Contexts, LatentSource, PictureTarget, PictureTargets, Targets, TextTargets
from prep.formatting import printable_name
from prep.fs.place import Place
from prep.geometry import PAIR, Placement
from prep.keys import MaskedLatentKeys
from prep.manifest.samples import NO_PROMPT, Reference, Sample, Samples, Text, View
from prep.recipe.prompts import Prompt
from prep.recipe.schema import Recipe


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
    keys = RowKeys.of(recipe, contexts, latents_from)
    samples, labels = Samples(), list[str]()
    latents, masks, embeddings, texts = PictureTargets(), PictureTargets(), PictureTargets(), TextTargets()
    by_source = [keys.of_source(recipe, number) for number in range(len(recipe.sources))]
    for seat in placed_items(recipe, survey.items, roles, bucketing, taken_from=items if once else None):
        source = seat.item.item.source
        views = _views(seat, recipe.sources[source].path, by_source[source], latents, masks)
        embedding = None if keys.embedding is None else embedding_target(
            seat.item, seat.views[0], keys.embedding, keys.alpha)
        if embedding is not None:
            embeddings.add(embedding)
        samples.add(_sample(seat, recipe, views, keys, texts, None if embedding is None else embedding.key))
        labels.append(seat.item.item.label)
    if items is not None:
        items.clear()
    painted = painted_in(samples, prompt_references)
    rows, shown, under = targets_of_prompts(prompts, prompt_references, keys, texts, painted)
    for all_rows, own in ((latents, shown), (masks, under)):
        for target in own.values():
            all_rows.add(target)
    return Targets(samples=samples, labels=tuple(labels), prompts=rows,
                   unconditional=keys.text.unconditional, latents=latents, masks=masks,
                   texts=texts, embeddings=embeddings,
                   findings=(*survey.findings, *bucketing.findings),
                   notices=notices)


def _views(seat: PlacedItem, source: Place, keys: RowKeys, latents: PictureTargets, masks: PictureTargets
           ) -> tuple[View, ...]:
    """The views of a placed item of a source; adds the targets of their rows to `latents` and `masks`."""
    item, name, views = seat.item, seat.item.item.label, []
    known = item.references if seat.references and keys.masked is None else ()
    for placement, placed in zip(seat.views, seat.references or [()] * len(seat.views), strict=True):
        latent = _latent_target(item, placement, name, keys)
        mask = _mask_target(item, placement, name, keys)
        if mask is not None:
            masks.add(mask)
        if keys.masked is not None:
            assert mask is not None, "a picture without a mask has no place"
            works = [_masked_target(item, latent, mask, keys.masked, keys)]
            references: tuple[Reference, ...] = (Reference(
                name=item.item.name, picture=item.picture, size=item.size, placement=placement, latent=works[0].key),)
        else:
            works = [reference_target(each, place, name, keys) for each, place in zip(known, placed, strict=True)]
            references = tuple(reference_of(each, reference_name(item.item, each.blob, source), work)
                               for each, work in zip(known, works, strict=True))
        for work in (latent, *works):
            latents.add(work)
        views.append(View(placement=placement, latent=latent.key, mask=None if mask is None else mask.key,
                          references=references))
    return tuple(views)


def _sample(seat: PlacedItem, recipe: Recipe, views: tuple[View, ...], keys: RowKeys,
            targets: TextTargets, embedding: str | None) -> Sample:
    """The sample of a placed item, with the key of its embedding; adds the targets of its text rows."""
    item, name, source = seat.item, seat.item.item.label, recipe.sources[seat.item.item.source]
    shown = item.references and recipe.reference_fit != PAIR
    seen = keys.seen(zip(item.references, seat.references[0], strict=True) if shown else (), name)
    texts = tuple(Text(caption=caption, weight=weight, key=add_text(targets, keys.text, caption, seen, name))
                  for caption, weight in item.captions)
    if seen:
        texts += (Text(caption=NO_PROMPT, weight=0.0, key=add_text(targets, keys.text, None, seen, name)),)
    return Sample(id=seat.id, name=item.item.name, source=item.item.source, role=seat.role, picture=item.picture,
                  size=item.size, bucket=seat.bucket, views=views, texts=texts, repeats=seat.repeats,
                  weight=source.weight, embedding=embedding)


def _latent_target(item: KnownItem, placement: Placement, name: str, keys: RowKeys) -> PictureTarget:
    if keys.imported is not None:
        latents_from, own = keys.imported
        return latents_from.target(item, placement, own)
    key = keys.latent.key(item.picture, placement, keys.alpha if item.has_alpha else None)
    return PictureTarget(key=key, name=name, file=name, blob=item.item.picture, digest=item.picture,
                         placement=placement)


def _masked_target(item: KnownItem, latent: PictureTarget, mask: PictureTarget, masked: MaskedLatentKeys, keys: RowKeys
                 ) -> PictureTarget:
    """The target of the latent of a picture with a hole where its mask is white; the other two are theirs."""
    key = masked.key(item.picture, mask.origin, latent.placement, keys.alpha if item.has_alpha else None)
    return latent._replace(key=key, file=f"{latent.file}{under_its_mask(mask)}", hole=mask)


def _mask_target(item: KnownItem, placement: Placement, name: str, keys: RowKeys) -> PictureTarget | None:
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
