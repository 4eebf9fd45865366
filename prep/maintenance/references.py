"""Recomputes, from a manifest and its tables, which rows it references and which key each must have.

References are stored as columns, 14 bytes each; names and keys are made for one shard at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prep.cache.ledger.columns import Column
from prep.geometry import Placement
from prep.keys import EmbeddingKeys, LatentKeys, MaskedLatentKeys, MaskKeys, SeenPicture, TextKeys, drawn_origin
from prep.manifest.consistency import reference_sizes, seen_ways, shown_pictures
from prep.manifest.opened import OpenedManifest
from prep.manifest.samples import NO_PROMPT, ShownPicture, shown_in
from prep.parse import Alpha, color_below

LATENT, MASK, TEXT, PROMPT, REFERENCE, EMBEDDING = range(6)
UNKNOWN: tuple[str, ...] = ()  # of a mask from a file, whose digest is not stored anywhere


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A needed row, the number of its use, and the keys that it may have (empty: not known)."""

    row: int
    use: int
    keys: tuple[str, ...]


class References:
    """All uses of rows by samples and prompts, by shard."""

    def __init__(self, audit: OpenedManifest) -> None:
        self._samples = audit.samples
        self._prompts = tuple(_prompts(audit.manifest.document["prompts"]))
        self._keys, self._buckets, self._manifest = _SampleKeys(audit), audit.manifest.buckets, audit.manifest
        views, texts, references = self._samples.views, self._samples.texts, self._samples.references
        self._sizes = reference_sizes(audit.manifest, audit.samples)
        masked = np.flatnonzero(views["mask_shard"] >= 0)
        embeddings = self._samples.embeddings
        embedded = np.flatnonzero(embeddings["embedding_shard"] >= 0)
        parts = [  # (kind, number within its kind, shard, row)
            (LATENT, np.arange(len(views["latent_shard"])), views["latent_shard"], views["latent_row"]),
            (MASK, masked, views["mask_shard"][masked], views["mask_row"][masked]),
            (TEXT, np.arange(len(texts["shard"])), texts["shard"], texts["row"]),
            (PROMPT, np.arange(len(self._prompts)), [prompt.shard for prompt in self._prompts],
             [prompt.row for prompt in self._prompts]),
            (REFERENCE, np.arange(len(references["latent_shard"])), references["latent_shard"],
             references["latent_row"]),
            (EMBEDDING, embedded, embeddings["embedding_shard"][embedded], embeddings["embedding_row"][embedded]),
        ]
        shards = np.concatenate([np.asarray(shard, np.int32) for *_, shard, _ in parts])
        rows = np.concatenate([np.asarray(row, np.int32) for *_, row in parts])
        order = np.lexsort((rows, shards))
        self._shards, self._rows = shards[order], rows[order]
        kinds, numbers = [part[0] for part in parts], [part[1] for part in parts]
        self._kinds = np.repeat(np.array(kinds, np.uint8), [len(part) for part in numbers])[order]
        self._numbers = np.concatenate(numbers).astype(np.int32)[order]

    def rows(self, shard: int) -> list[int]:
        """The needed rows of a shard, sorted and unique."""
        first, past = self._span(shard)
        rows: list[int] = np.unique(self._rows[first:past]).tolist()
        return rows

    def names(self, shard: int, row: int | None) -> list[str]:
        """The users of a row of a shard, or of any of its rows (`row` None)."""
        first, past = self._span(shard)
        places = range(first, past) if row is None else first + np.flatnonzero(self._rows[first:past] == row)
        return sorted({self.who(int(at)) for at in places})

    def needs(self, shard: int) -> Iterator[Reference]:
        """Every use of a shard's rows, sorted by row."""
        first, past = self._span(shard)
        columns = (self._rows[first:past], self._kinds[first:past], self._numbers[first:past],
                   self._owners(slice(first, past)))
        lists = (column.tolist() for column in columns)
        for use, (row, kind, number, owner) in enumerate(zip(*lists, strict=True), first):
            yield Reference(row=row, use=use, keys=self._keys_of(kind, number, owner))

    def who(self, use: int) -> str:
        """The user of a row: a sample's name, or a label for a row that the manifest itself needs."""
        if self._kinds[use] == PROMPT:
            return self._prompts[int(self._numbers[use])].who
        return self._samples.name(int(self._owners(slice(use, use + 1))[0]))

    def _span(self, shard: int) -> tuple[int, int]:
        first, past = np.searchsorted(self._shards, [shard, shard + 1]).tolist()
        return first, past

    def _owners(self, uses: slice) -> Column:
        """The sample of each use; meaningless for prompts."""
        numbers, kinds, samples = self._numbers[uses], self._kinds[uses], self._samples
        views, texts, references = (np.searchsorted(offsets, numbers, side="right") - 1 for offsets in (
            samples.view_offsets, samples.text_offsets, samples.reference_offsets))
        return np.select([kinds == TEXT, kinds == REFERENCE, kinds == EMBEDDING], [texts, references, numbers], views)

    def _keys_of(self, kind: int, number: int, owner: int) -> tuple[str, ...]:
        if kind == PROMPT:
            prompt = self._prompts[number]
            if prompt.reference is not None:
                picture, placement = prompt.reference
                if prompt.mask is None:
                    return self._keys.reference(picture, placement)
                return (self._keys.mask if prompt.masking else self._keys.reference)(picture, placement, prompt.mask)
            return self._keys.prompt(prompt.caption, prompt.shown, negative=prompt.negative)
        if kind == TEXT:
            place, captions = number - int(self._samples.text_offsets[owner]), self._samples.captions(owner)
            shown = shown_pictures(self._manifest, self._samples, owner)
            if place == len(captions):
                return (*self._keys.prompt(None, shown), *self._keys.text(NO_PROMPT, shown))
            return self._keys.text(captions[place], shown)
        if kind == MASK and not self._keys.knows_masks:
            return UNKNOWN
        if kind == REFERENCE and self._keys.knows_references:
            at = number - int(self._samples.reference_offsets[owner])
            picture = self._samples.table["references"][owner][at]["picture"].as_py().hex()
            width, height = self._sizes[number].tolist()
            return self._keys.reference(picture, self._samples.reference_placement(number, (width, height)))
        if kind == REFERENCE:
            return UNKNOWN
        picture = self._samples.table["picture"][owner].as_py().hex()
        if kind == EMBEDDING:
            number = int(self._samples.view_offsets[owner])  # of the first view, not mirrored
        placement = self._samples.placement(number, self._buckets[int(self._samples.bucket[owner])])
        if kind == EMBEDDING:
            return self._keys.embedding(picture, replace(placement, flip=False))
        return self._keys.latent(picture, placement) if kind == LATENT else self._keys.mask(picture, placement)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompt:
    who: str
    caption: str | None = None  # None: the unconditional row, or a reference
    negative: bool = False
    shown: Sequence[ShownPicture] = ()  # the prompt's references
    reference: tuple[str, Placement] | None = None  # the digest of a picture, and how it is placed
    mask: str | None = None  # the digest of the mask that the prompt names
    masking: bool = False  # whether it is the row of that
    shard: int
    row: int


def _prompts(document: Mapping[str, Any]) -> Iterator[_Prompt]:
    yield _Prompt(who="(unconditional)", caption=None, **document["unconditional"])
    for sample in document["samples"]:
        who = f"(prompt) {sample['prompt']}"
        references = sample.get("references", ())
        shown = [shown_in(each) for each in references]
        yield _Prompt(who=who, caption=sample["prompt"], shown=shown, **sample["positive"])
        yield _Prompt(who=who, caption=sample["negative"], shown=shown, negative=True, **sample["negative_row"])
        for each, known in zip(references, shown, strict=True):
            mask = each.get("mask")
            picture = _Prompt(who=who, shard=each["shard"], row=each["row"], reference=(known.picture, known.placement),
                              mask=None if mask is None else mask["digest"])
            yield picture
            if mask is not None:
                yield replace(picture, masking=True, shard=mask["shard"], row=mask["row"])


class _SampleKeys:
    """Computes the keys that rows may have, from the contexts in a manifest and what it says of transparency."""

    def __init__(self, audit: OpenedManifest) -> None:
        fields, latents = audit.manifest.fields, audit.manifest.document["latents"]
        contexts = {name: field.context for name, field in fields.items()}
        # Keys of imported latents have digests of files that the manifest does not store.
        known = "latent" in contexts and "alpha" in latents and "imported" not in latents
        self._latents = LatentKeys(contexts["latent"]) if known else None
        self._masks = MaskKeys(contexts["mask"]) if "mask" in contexts else None
        self._masked = (MaskedLatentKeys(contexts["latent"], contexts["mask"])
                        if audit.manifest.inpaints and known and "mask" in contexts else None)
        self._texts = TextKeys(contexts["text"]) if "text" in contexts else None
        self._embeddings = (EmbeddingKeys(contexts["embedding"]) if "embedding" in contexts and "alpha" in latents
                            else None)
        self._manifest = audit.manifest
        self.knows_masks = contexts.get("mask", {}).get("origin") == "alpha"
        # Those of masked pictures have what their masks were made from.
        self.knows_references = self.knows_masks or not audit.manifest.inpaints
        alpha = audit.manifest.alpha
        self._alphas: tuple[Alpha | None, ...] = (None,) if alpha is None else (None, alpha)

    def latent(self, picture: str, placement: Placement) -> tuple[str, ...]:
        """The keys without and with transparency: the manifest does not store whether a picture has some."""
        keys = self._latents
        return UNKNOWN if keys is None else tuple(keys.key(picture, placement, alpha) for alpha in self._alphas)

    def embedding(self, picture: str, placement: Placement) -> tuple[str, ...]:
        """The keys of a picture's embedding without and with transparency, as `latent`."""
        keys = self._embeddings
        return UNKNOWN if keys is None else tuple(keys.key(picture, placement, color_below(alpha))
                                                  for alpha in self._alphas)

    def reference(self, picture: str, placement: Placement, mask: str | None = None) -> tuple[str, ...]:
        """The keys of a reference's latent; of a masked picture's known only if its mask's is. `mask`: the digest of
        the mask's file, if that is known."""
        if self._masked is None:
            return self.latent(picture, placement) if self.knows_references else UNKNOWN
        return tuple(self._masked.key(picture, origin, placement, alpha)
                     for origin in self._origins(picture, mask) for alpha in self._alphas)

    def mask(self, picture: str, placement: Placement, mask: str | None = None) -> tuple[str, ...]:
        """The keys of a picture's mask, as `reference`."""
        keys = self._masks
        return UNKNOWN if keys is None else tuple(keys.key(origin, placement)
                                                  for origin in self._origins(picture, mask))

    def _origins(self, picture: str, mask: str | None) -> tuple[str, ...]:
        """What the mask of a picture may be made from: the file `mask`; or the picture's transparency, or it is drawn.
        The digests of other files are not stored anywhere."""
        if mask is not None:
            return (mask,)
        return (picture, drawn_origin(picture)) if self.knows_masks else UNKNOWN

    def text(self, caption: str, shown: Sequence[ShownPicture]) -> tuple[str, ...]:
        """`shown`: the references beside the caption."""
        keys = self._texts
        return UNKNOWN if keys is None else tuple(keys.key(caption, seen) for seen in self._seen(shown))

    def prompt(self, caption: str | None, shown: Sequence[ShownPicture], *, negative: bool = False) -> tuple[str, ...]:
        """`caption` None: the unconditional row."""
        keys = self._texts
        if keys is None:
            return UNKNOWN
        if caption is None:
            return tuple(keys.without_prompt(seen) for seen in self._seen(shown))
        return tuple((keys.negative if negative else keys.key)(caption, seen) for seen in self._seen(shown))

    def _seen(self, shown: Sequence[ShownPicture]) -> list[tuple[SeenPicture, ...]]:
        return seen_ways(self._manifest, shown)
