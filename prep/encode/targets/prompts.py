"""Computes the targets of sample prompts, and of the pictures and masks that they name.

Pure, as `prep.encode.targets.samples`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from prep.dataset.prompt_references import NamedMask, PromptReference, PromptReferences
from prep.encode.targets.keys import RowKeys, add_text, reference_of, reference_target, under_its_mask
from prep.encode.targets.records import Contexts, PictureTarget, PromptTarget, Targets, TextTargets
from prep.errors import ConfigError
from prep.formatting import printable_name
from prep.geometry import Size, cover
from prep.manifest.samples import Reference, ReferenceMask, Samples
from prep.models.family import Family
from prep.parse import Alpha
from prep.recipe.prompts import Prompt

_Works = dict[str, PictureTarget]


@dataclass(frozen=True, kw_only=True, slots=True)
class Painted:
    """What prompts may be painted into."""

    pictures: Mapping[str, Reference]  # masked ones of samples, as they are and not mirrored, by the picture's digest
    buckets: Sequence[Size]  # for others, to which prompts give masks


def prompt_targets(prompts: Sequence[Prompt], references: PromptReferences, contexts: Contexts,
                   alpha: Alpha | None, family: Family, painted: Painted) -> Targets:
    """The targets of prompts alone, and of the unconditional row; `alpha`: what becomes of transparency. Of the
    pictures that are `painted` none is a target: the samples have them."""
    keys = RowKeys.of_prompts(contexts, family, alpha)
    texts = TextTargets()
    rows, latents, masks = targets_of_prompts(prompts, references, keys, texts, painted)
    return Targets(samples=Samples(), labels=(), prompts=rows, unconditional=keys.text.unconditional, latents=latents,
                   masks=masks, texts=texts, findings=())


def painted_in(samples: Samples, references: PromptReferences) -> Painted:
    """The masked pictures of samples that prompts name, as they are and not mirrored."""
    wanted = {each.known.picture for each in references.values() if each.placement is None}
    if not wanted:
        return Painted(pictures={}, buckets=())
    pictures = {reference.picture: reference for sample in samples if sample.picture in wanted
                for view in sample.views for reference in view.references if not view.placement.flip}
    return Painted(pictures=pictures, buckets=sorted({size for size, _ in samples.shapes}))


def targets_of_prompts(prompts: Sequence[Prompt], references: PromptReferences, keys: RowKeys, texts: TextTargets,
                       painted: Painted) -> tuple[tuple[PromptTarget, ...], _Works, _Works]:
    """The targets of prompts, and those of the pictures and of the masks that they name, by key; adds those of their
    text rows, and of the unconditional row. Raises `ConfigError` for a picture to paint into that is not `painted`."""
    works: list[PictureTarget] = []
    shown: dict[tuple[str, str], Reference] = {}
    for named, each in references.items():
        if each.mask is not None:
            works.append(_masked_prompt_target(each, each.mask, painted, keys))
            shown[named] = _under_mask(each, each.mask, works[-1])
        elif each.placement is None:
            shown[named] = _to_paint(each, painted)
        else:
            works.append(reference_target(each.known, each.placement,
                                         f"reference of the prompt in line {each.line}", keys))
            shown[named] = reference_of(each.known, each.name, works[-1])
    rows = []
    for prompt in prompts:
        name = f"reference of the prompt in line {prompt.line}"
        seen = keys.seen([(references[each].known, shown[each].placement) for each in prompt.pictures], name)
        rows.append(PromptTarget(
            prompt=prompt.text, negative=prompt.negative, settings=prompt.settings,
            positive_key=add_text(texts, keys.text, prompt.text, seen, name),
            negative_key=add_text(texts, keys.text, prompt.negative, seen, name, negative=True),
            references=tuple(shown[each] for each in prompt.pictures)))
    add_text(texts, keys.text, None, (), "")
    return (tuple(rows), {work.key: work for work in works},
            {work.hole.key: work.hole for work in works if work.hole is not None})


def _masked_prompt_target(named: PromptReference, own: NamedMask, painted: Painted, keys: RowKeys) -> PictureTarget:
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
    return PictureTarget(key=key, name=name, file=f"{name}: {printable_name(known.blob.name)}{under_its_mask(mask)}",
                         blob=known.blob, digest=known.picture, placement=placement, hole=mask)


def _nearest(size: Size, buckets: Sequence[Size]) -> Size:
    """The bucket nearest to the shape of a picture; of several the largest."""
    def apart(bucket: Size) -> tuple[Fraction, int]:
        sides = size[0] * bucket[1], size[1] * bucket[0]
        return Fraction(max(sides), min(sides)), -bucket[0] * bucket[1]

    return min(buckets, key=apart)


def _under_mask(named: PromptReference, own: NamedMask, work: PictureTarget) -> Reference:
    assert work.hole is not None, "a masked picture has a mask"
    return replace(reference_of(named.known, named.name, work),
                   mask=ReferenceMask(name=own.name, digest=own.digest, key=work.hole.key))


def _to_paint(named: PromptReference, painted: Painted) -> Reference:
    found = painted.pictures.get(named.known.picture)
    if found is None:
        raise ConfigError(f"the prompt in line {named.line} names {printable_name(named.name)}, expected a picture of "
                          "the data set, whose mask says what is painted, or --mask",
                          hint='--mask MASK in the line paints into any picture; a source with role = "validation" '
                          "has pictures that are only drawn from")
    return replace(found, name=named.name)
