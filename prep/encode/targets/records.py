"""The targets of an encode: samples and prompts with the keys of their rows, and for each key what makes its row.

`prep.encode.targets.samples` and `prep.encode.targets.prompts` compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from prep.arrays import DType
from prep.buckets.assign import Assignments
from prep.cache.records import Reject
from prep.dataset.ingest import Ingested, KnownItem
from prep.findings import Finding
from prep.fs.blob import Blob
from prep.fs.memo import Memo
from prep.geometry import Placement, Size
from prep.keys import ImportedLatentKeys, drawn_origin
from prep.manifest.samples import Reference, Sample, Samples
from prep.models.family import Family
from prep.recipe.prompts import PromptSettings
from prep.recipe.schema import Recipe

EncodedRow = Mapping[str, np.ndarray[Any, Any]]  # array name → one row, bfloat16 as uint16
Row = TypeVar("Row")
Made = EncodedRow | Reject | Finding  # a row; a permanent failure; a failure of this run

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


class _ByKey(Mapping[str, Row]):
    """Rows to encode, by key, in the form in which a million of them are kept."""

    _rows: dict[str, Any]

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class PictureTargets(_ByKey[PictureTarget]):
    """Latent or mask rows to encode, by key. Those of samples' own pictures are made into records when asked for: each
    takes 150 bytes, and a record with its path, file and digest 420."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Any, ...] | PictureTarget] = {}
        self._shared: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # what many targets have in common, each to itself

    def add(self, target: PictureTarget) -> None:
        """Adds a target, unless there is one with its key."""
        if target.key in self._rows:
            return
        name, blob = target.name, target.blob
        if target.file != name or target.hole is not None:
            self._rows[target.key] = target
            return
        plain = blob == Blob(file=blob.file) and blob.file.endswith(name)  # as most: its path is a name that is there
        common = (blob.file[: -len(name)] if plain else None, target.placement, target.mask_from)
        where = () if plain else (blob.file, blob.offset, blob.length, blob.member, blob.version)
        self._rows[target.key] = (name, self._shared.setdefault(common, common), bytes.fromhex(target.digest), *where)

    def __getitem__(self, key: str) -> PictureTarget:
        row = self._rows[key]
        if isinstance(row, PictureTarget):
            return row
        name, (folder, placement, mask_from), digest, *where = row
        file, offset, length, member, version = where or (f"{folder}{name}", 0, None, "", "")
        blob = Blob(file=file, offset=offset, length=length, member=member, version=version)
        return PictureTarget(key=key, name=name, file=name, blob=blob, digest=digest.hex(), placement=placement,
                             mask_from=mask_from)


class TextTargets(_ByKey[TextTarget]):
    """Text rows to encode, by key. Most have a caption and nothing else, and are made into a record when asked for."""

    def __init__(self) -> None:
        self._rows: dict[str, str | TextTarget | None] = {}

    def add(self, target: TextTarget) -> None:
        """Adds a target, in place of one with its key."""
        plain = not (target.negative or target.pictures)
        self._rows[target.key] = target.caption if plain else target

    def __getitem__(self, key: str) -> TextTarget:
        known = self._rows[key]
        return known if isinstance(known, TextTarget) else TextTarget(key=key, caption=known)


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
    embedding: Mapping[str, Any] | None = None  # None: the recipe names no vision model

    def by_field(self) -> dict[str, Mapping[str, Any]]:
        """Context by field name, without fields that have none."""
        named = {"latent": self.latent, "mask": self.mask, "text": self.text, "embedding": self.embedding}
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
    embeddings: Mapping[str, PictureTarget] = field(default_factory=dict)
    findings: tuple[Finding, ...]
    notices: tuple[str, ...] = field(default=())

    def bucket_of(self, field: str, key: str) -> Size | None:
        """The bucket of a latent or mask row; the shapes of others do not depend on it."""
        targets = {"latent": self.latents, "mask": self.masks}.get(field, {})
        return targets[key].placement.bucket if key in targets else None

    def rows_by_field(self) -> dict[str, Mapping[str, PictureTarget] | Mapping[str, TextTarget]]:
        """The targets of each field, by key; embeddings only if there are some."""
        embeddings = {"embedding": self.embeddings} if self.embeddings else {}
        return {"latent": self.latents, "mask": self.masks, "text": self.texts, **embeddings}

    def by_field(self) -> dict[str, list[str]]:
        """The wanted keys of each field, sorted."""
        return {field: sorted(rows) for field, rows in self.rows_by_field().items()}

    @property
    def rows(self) -> int:
        """How many rows are wanted."""
        return len(self.latents) + len(self.masks) + len(self.texts) + len(self.embeddings)

    def keys(self) -> list[str]:
        """All wanted keys, sorted."""
        return sorted([*self.latents, *self.masks, *self.texts, *self.embeddings])


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
