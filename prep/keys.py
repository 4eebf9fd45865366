"""Computes row keys: digests of everything that decides a row's value, and nothing else.

A key is the SHA-256 of canonical JSON (integers and strings only). `kind` names the field; raise `meaning` by hand
when this code's result for the same inputs changes. A field's *context* is the part of the key that all its rows
share; the manifest stores it, so that an edited caption can be keyed without the model.

    latent   picture digest, placement, [red, green, blue] below transparent pixels, or "keep", if it has any;
             context: image policy, VAE fingerprint, posterior, dtypes
    imported latent
             picture digest, digest of the file that had it, placement;
             context: origin, fingerprint of the VAE that it is said to be of, dtype
    masked latent
             of a picture with a hole: what the latent's key has, and that of its mask: mask file's digest (or the
             picture's), and the mask's context
    mask     mask file's digest (or the picture's, for its alpha; or that of a mask to be drawn for the picture),
             placement; context: origin, factor, and for families that inpaint what the mask has of each cell
    text     the final caption string, and the reference pictures that the text encoder sees with it, in order: digest,
             placement and color as of a latent; context: text fingerprint, max length, layout, dtypes, and what else
             the family's pipeline makes rows from. A negative prompt has a key of its own where `negatives` is in the
             context
    embedding
             picture digest, placement, [red, green, blue] below transparent pixels if it has any;
             context: image policy, fingerprint of the vision model, its output, dtypes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prep.digest import HOLE, digest_json, digest_spelled, integers, json_template, string
from prep.geometry import Placement
from prep.parse import KEPT, RGB, Alpha

Context = Mapping[str, str | int | Mapping[str, str | int]]

LATENT_MEANING = 1
MASK_MEANING = 1
DRAWN_MEANING = 1  # of masks that `prep.images.drawn_mask` draws
TEXT_MEANING = 1
IMPORTED_MEANING = 1
EMBEDDING_MEANING = 1


class LatentKeys:
    """The keys of latents that share a context; their common text is made once (1.6 µs per key, not 20)."""

    _kind = "latent"

    def __init__(self, context: Context) -> None:
        self._parts = json_template({"kind": self._kind, "alpha": HOLE, "context": context, "picture": HOLE,
                                     "placement": HOLE})

    def key(self, picture: str, placement: Placement, alpha: Alpha | None) -> str:
        """The key of the latent of the picture with digest `picture` at `placement`.

        `alpha` is what becomes of its transparency, independent of how the recipe spells it; `None` for an opaque
        picture.
        """
        first, second, third, last = self._parts
        return digest_spelled(f"{first}{_spell_alpha(alpha)}{second}{string(picture)}{third}{_spell(placement)}{last}")


class ImportedLatentKeys:
    """The keys of latents that another program made, which no latent that is encoded here can have."""

    def __init__(self, context: Context) -> None:
        self._parts = json_template({"kind": "imported latent", "context": context, "file": HOLE, "picture": HOLE,
                                     "placement": HOLE})

    def key(self, picture: str, file: str, placement: Placement) -> str:
        """The key of the latent of the picture with digest `picture`, in the file with digest `file`."""
        first, second, third, last = self._parts
        return digest_spelled(f"{first}{string(file)}{second}{string(picture)}{third}{_spell(placement)}{last}")


class EmbeddingKeys(LatentKeys):
    """The keys of embeddings that share a context, of the same as latents; `alpha` is a color or `None`."""

    _kind = "embedding"


class MaskedLatentKeys:
    """The keys of latents of pictures with a hole where their masks are white, which share the contexts of latents and
    of masks."""

    def __init__(self, context: Context, mask: Context) -> None:
        self._parts = json_template({"kind": "masked latent", "alpha": HOLE, "context": context, "mask": mask,
                                     "origin": HOLE, "picture": HOLE, "placement": HOLE})

    def key(self, picture: str, origin: str, placement: Placement, alpha: Alpha | None) -> str:
        """The key of such a latent: as `LatentKeys.key`, with `origin` as in `MaskKeys.key`."""
        first, second, third, fourth, last = self._parts
        return digest_spelled(f"{first}{_spell_alpha(alpha)}{second}{string(origin)}{third}{string(picture)}{fourth}"
                              f"{_spell(placement)}{last}")


class MaskKeys:
    """The keys of masks that share a context."""

    def __init__(self, context: Context) -> None:
        self._parts = json_template({"kind": "mask", "context": context, "origin": HOLE, "placement": HOLE})

    def key(self, origin: str, placement: Placement) -> str:
        """The key of the mask at `placement`; `origin` is the digest of the mask file, or of the picture for its
        alpha, or what `drawn_origin` says.
        """
        first, second, last = self._parts
        return digest_spelled(f"{first}{string(origin)}{second}{_spell(placement)}{last}")


def drawn_origin(picture: str) -> str:
    """What stands for a mask's file where it is drawn for the picture with digest `picture`."""
    return digest_json({"kind": "drawn mask", "meaning": DRAWN_MEANING, "picture": picture})


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenPicture:
    """A reference picture as a text encoder sees it."""

    picture: str  # its digest
    placement: Placement
    alpha: RGB | None  # the color below its transparent pixels; None for an opaque picture

    def as_json(self) -> dict[str, Any]:
        """As it is in the key of a text row."""
        scaled, crop, bucket = (list(pair) for pair in (self.placement.scaled, self.placement.crop,
                                                        self.placement.bucket))
        return {"picture": self.picture, "alpha": None if self.alpha is None else list(self.alpha),
                "placement": {"scaled": scaled, "crop": crop, "bucket": bucket, "flip": int(self.placement.flip)}}


class TextKeys:
    """The keys of text rows that share a context.

    `seen` are the reference pictures that the text encoder sees with a caption, in order; without, a key is that of the
    words alone.
    """

    def __init__(self, context: Context) -> None:
        self._parts = json_template({"kind": "text", "caption": HOLE, "context": context})
        self._context = context
        self.unconditional = unconditional_key(context)

    def key(self, caption: str, seen: Sequence[SeenPicture] = ()) -> str:
        """The key of the text row of the final string `caption`."""
        if seen:
            return _seeing_key({"caption": caption}, self._context, seen)
        first, last = self._parts
        return digest_spelled(f"{first}{string(caption)}{last}")

    def negative(self, caption: str, seen: Sequence[SeenPicture] = ()) -> str:
        """The key of the text row of the negative prompt `caption`."""
        return negative_key(caption, self._context, seen)

    def without_prompt(self, seen: Sequence[SeenPicture]) -> str:
        """The key of the row for "no prompt" that the pipeline uses with these pictures."""
        return unconditional_key(self._context, seen)


def text_key(caption: str, context: Context, seen: Sequence[SeenPicture] = ()) -> str:
    """The key of one text row."""
    return TextKeys(context).key(caption, seen)


def negative_key(caption: str, context: Context, seen: Sequence[SeenPicture] = ()) -> str:
    """The key of one negative prompt's row: that of the caption, unless the family encodes negatives otherwise."""
    if "negatives" not in context:
        return text_key(caption, context, seen)
    return _seeing_key({"negative": caption}, context, seen)


def unconditional_key(context: Context, seen: Sequence[SeenPicture] = ()) -> str:
    """The key of the row for "no prompt"; differs from that of the caption "", even if a family encodes both alike."""
    return _seeing_key({"unconditional": 1}, context, seen)


def _seeing_key(words: Mapping[str, str | int], context: Context, seen: Sequence[SeenPicture]) -> str:
    references = {"references": [each.as_json() for each in seen]} if seen else {}
    return digest_json({"kind": "text", **words, "context": context, **references})


def sample_id(picture: str, bucket: tuple[int, int], copy: int, references: Sequence[str] = ()) -> str:
    """The id of a sample: from its picture, its bucket, its number among byte-equal copies, and the digests of its
    reference pictures, if it has any."""
    if references:
        return digest_json({"kind": "sample", "bucket": list(bucket), "copy": copy, "picture": picture,
                            "references": list(references)})
    first, second, third, last = _SAMPLE
    return digest_spelled(f"{first}{integers(bucket)}{second}{copy:d}{third}{string(picture)}{last}")


def latent_context(*, image: Mapping[str, str | int], vae: str, posterior: str, compute: str,
                   stored: str, tile: int = 0) -> dict[str, Any]:
    """What all latents of a run share: image policy, VAE fingerprint, posterior, dtypes, and the side of tiles if any.
    """
    return {"meaning": LATENT_MEANING, "image": picture_policy(image), "vae": vae, "posterior": posterior,
            "compute": compute, "stored": stored, **({"tile": tile} if tile else {})}


def picture_policy(image: Mapping[str, str | int]) -> dict[str, str | int]:
    """The part of an image policy that decides the pixels of pictures, rather than of masks."""
    return {name: value for name, value in image.items() if not name.startswith("mask_")}


def imported_context(*, origin: str, vae: str, stored: str) -> dict[str, Any]:
    """What all imported latents of a run share: who cached them, the VAE that they are said to be of, dtype."""
    return {"meaning": IMPORTED_MEANING, "origin": origin, "vae": vae, "posterior": "sample", "stored": stored}


def mask_context(*, image: Mapping[str, str | int], origin: str, factor: int, cell: str = "") -> dict[str, Any]:
    """What all masks of a run share: image policy, origin (`file` or `alpha`), latent factor; `cell`: what they have of
    each latent cell, if that is not the policy's."""
    policy = {name: value for name, value in image.items() if name not in ("colour", "resize")}
    return {"meaning": MASK_MEANING, "image": {**policy, **({"mask_cell": cell} if cell else {})}, "origin": origin,
            "factor": factor}


def text_context(*, text: str, max_length: int, layout: str, compute: str, stored: str,
                 more: Mapping[str, str | int | Mapping[str, str | int]] | None = None) -> dict[str, Any]:
    """What all text rows of a run share: text fingerprint, token limit, layout, dtypes.

    `more` is what only some families or recipes have: layers skipped, options and constants of the pipeline.
    """
    return {"meaning": TEXT_MEANING, "text": text, "max_length": max_length, "layout": layout, "compute": compute,
            "stored": stored, **(more or {})}


def embedding_context(*, image: Mapping[str, str | int], model: str, output: str, compute: str,
                      stored: str) -> dict[str, Any]:
    """What all embeddings of a run share: image policy, fingerprint of the vision model, which output, dtypes."""
    return {"meaning": EMBEDDING_MEANING, "image": picture_policy(image), "model": model, "output": output,
            "compute": compute, "stored": stored}


def _spell(placement: Placement) -> str:
    """The placement in canonical JSON."""
    (wide, high), (left, top), (width, height) = placement.scaled, placement.crop, placement.bucket
    return (f'{{"bucket":[{width:d},{height:d}],"crop":[{left:d},{top:d}],"flip":{placement.flip:d},'
            f'"scaled":[{wide:d},{high:d}]}}')


def _spell_alpha(alpha: Alpha | None) -> str:
    """What becomes of transparency in canonical JSON."""
    if alpha is None:
        return "null"
    return string(alpha) if alpha == KEPT else integers(alpha)


_SAMPLE = json_template({"kind": "sample", "bucket": HOLE, "copy": HOLE, "picture": HOLE})
