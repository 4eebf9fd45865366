"""Names the rows of pictures and texts by their keys, by a recipe's settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from prep.dataset.ingest import KnownItem, KnownReference
from prep.encode.targets.records import Contexts, LatentSource, PictureTarget, TextTarget, TextTargets
from prep.formatting import printable_name
from prep.geometry import Placement
from prep.keys import EmbeddingKeys, ImportedLatentKeys, LatentKeys, MaskedLatentKeys, MaskKeys, SeenPicture, TextKeys
from prep.manifest.samples import Reference
from prep.models.families.registry import FAMILIES
from prep.models.family import Family, Vision
from prep.parse import Alpha, alpha_of, color_below
from prep.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKeys:
    """Makes the keys of each field, from the item and the settings here."""

    latent: LatentKeys
    mask: MaskKeys | None
    masked: MaskedLatentKeys | None  # None: the family does not inpaint
    text: TextKeys
    vision: Vision | None  # how the text encoder sees references; None: it does not
    alpha: Alpha | None  # what becomes of transparency; None: it is refused
    origin: str | None = None  # of samples' masks: "file" or "alpha"; None: there are none
    embedding: EmbeddingKeys | None = None  # of samples; None: they have none
    draws: bool = False  # whether masks are drawn for pictures that have none
    imported: tuple[LatentSource, ImportedLatentKeys] | None = None  # of samples, instead of `latent`

    @classmethod
    def of_prompts(cls, contexts: Contexts, family: Family, alpha: Alpha | None) -> RowKeys:
        """The keys of the rows of prompts."""
        mask = contexts.mask
        masked = None if mask is None or family.inpainting is None else MaskedLatentKeys(contexts.latent, mask)
        return cls(latent=LatentKeys(contexts.latent), mask=None if mask is None else MaskKeys(mask), masked=masked,
                   text=TextKeys(contexts.text), vision=family.text.vision, alpha=alpha)

    @classmethod
    def of(cls, recipe: Recipe, contexts: Contexts, latents_from: LatentSource | None) -> RowKeys:
        """The keys of a recipe's rows, also of its prompts."""
        keys = cls.of_prompts(contexts, FAMILIES[recipe.model.family], alpha_of(recipe.image.alpha))
        return replace(keys, origin=None if contexts.mask is None else contexts.mask["origin"],
                       embedding=None if contexts.embedding is None else EmbeddingKeys(contexts.embedding),
                       imported=None if latents_from is None else (latents_from, ImportedLatentKeys(contexts.latent)))

    def of_source(self, recipe: Recipe, source: int) -> RowKeys:
        """The keys of a source's rows."""
        return replace(self, origin=None if recipe.mask_of(source) == "none" else self.origin,
                       draws=recipe.draws_mask(source))

    def seen(self, references: Iterable[tuple[KnownReference, Placement]], name: str) -> tuple[Seen, ...]:
        """References, placed for the VAE, as the text encoder sees them."""
        if self.vision is None:
            return ()
        found = []
        for each, placed in references:
            placement = self.vision.place(each.size, placed)
            assert placement is not None, "what cannot be seen is no reference"
            picture = SeenPicture(picture=each.picture, placement=placement,
                                  alpha=color_below(self.alpha) if each.has_alpha else None)
            found.append(Seen(picture, each, f"{name}: its reference {printable_name(each.blob.name)}"))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Seen:
    """A reference as the text encoder sees it."""

    picture: SeenPicture
    known: KnownReference
    file: str  # in messages

    def target(self, key: str, name: str) -> PictureTarget:
        """Its pixels for the text row `key`."""
        return PictureTarget(key=key, name=name, file=self.file, blob=self.known.blob, digest=self.known.picture,
                             placement=self.picture.placement)


def embedding_target(item: KnownItem, first: Placement, keys: EmbeddingKeys, alpha: Alpha | None) -> PictureTarget:
    """The target of an item's embedding: that of its first view, not mirrored. `alpha`: what becomes of transparency.
    """
    placement, name = replace(first, flip=False), item.item.label
    key = keys.key(item.picture, placement, color_below(alpha) if item.has_alpha else None)
    return PictureTarget(key=key, name=name, file=name, blob=item.item.picture, digest=item.picture,
                         placement=placement)


def add_text(targets: TextTargets, keys: TextKeys, caption: str | None, seen: Sequence[Seen], name: str, *,
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


def reference_target(reference: KnownReference, placement: Placement, name: str, keys: RowKeys) -> PictureTarget:
    """The target of a reference's latent: the same row as if the picture were a sample's, placed so."""
    key = keys.latent.key(reference.picture, placement, keys.alpha if reference.has_alpha else None)
    return PictureTarget(key=key, name=name, file=f"{name}: its reference {printable_name(reference.blob.name)}",
                         blob=reference.blob, digest=reference.picture, placement=placement)


def reference_of(known: KnownReference, name: str, work: PictureTarget) -> Reference:
    """The reference whose latent is the row of `work`."""
    return Reference(name=name, picture=known.picture, size=known.size, placement=work.placement, latent=work.key)


def under_its_mask(mask: PictureTarget) -> str:
    """What a message on a masked picture says of its mask, if that is a file."""
    return f", under its mask {printable_name(mask.blob.name)}," if mask.mask_from == "mask" else ""
