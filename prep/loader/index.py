"""Indexes a manifest's samples for training: buckets, repeats and the places of rows. Does not import torch.

Opening an index checks the place and shape of every row (`prep.manifest.consistency`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from prep.batching.split import ROLES
from prep.cache.ledger.columns import Column
from prep.cache.records import RowRef
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.fs.place import Place, is_file
from prep.geometry import Size
from prep.manifest.consistency import cache_of, check_places, first_shapes, read_samples, read_shards, row_shapes
from prep.manifest.document import Manifest, read_manifest
from prep.manifest.samples import SampleColumns
from prep.manifest.shards import ShardFacts
from prep.models.families.registry import FAMILIES
from prep.models.family import ATTENTION_MASK
from prep.models.fields import STD

_VALIDATION = ROLES.index("validation")


@dataclass(frozen=True, kw_only=True)
class Index:
    """Samples and shards, in the order in which a step plan counts occurrences."""

    manifest: Manifest
    cache: Cache
    samples: SampleColumns
    shards: tuple[ShardFacts, ...]

    def __reduce__(self) -> tuple[Callable[[Place, str, Place | None], Index], tuple[Place, str, Place | None]]:
        """Another process opens the manifest again, as workers of a `DataLoader` that are not forked."""
        return _reopened, (self.manifest.path.absolute(), self.manifest.digest, self.manifest.new_cache)

    @cached_property
    def training(self) -> tuple[Column, ...]:
        """The samples to train on, by bucket, in the table's order."""
        trained = self.samples.role != _VALIDATION
        return tuple(np.flatnonzero(trained & (self.samples.bucket == bucket))
                     for bucket in range(len(self.manifest.buckets)))

    @cached_property
    def validation(self) -> tuple[Column, ...]:
        """The samples to validate on, by bucket."""
        held_out = self.samples.role == _VALIDATION
        return tuple(np.flatnonzero(held_out & (self.samples.bucket == bucket))
                     for bucket in range(len(self.manifest.buckets)))

    @property
    def usual_size(self) -> Size:
        """The size with the most training samples, whatever references they have; the first in a tie."""
        counts: dict[Size, int] = {}
        for size, members in zip(self.manifest.buckets, self.training, strict=True):
            counts[size] = counts.get(size, 0) + len(members)
        return max(counts, key=counts.__getitem__)

    @cached_property
    def _ends(self) -> tuple[Column, ...]:
        """The cumulative number of occurrences of the first 1, 2, … samples, by bucket."""
        return tuple(np.cumsum(self.samples.repeats[members], dtype=np.int64) for members in self.training)

    @cached_property
    def identities(self) -> dict[object, object]:
        """The cache of `prep.loader.identity` for this index."""
        return {}

    @cached_property
    def with_std(self) -> bool:
        """Whether latents have standard deviations, so that training draws from their posterior: not those of pairs,
        whose pictures shall differ in nothing else."""
        return STD in self.manifest.fields["latent"].arrays and not self.paired

    @cached_property
    def tokens(self) -> Column:
        """The tokens of rows of text, by shard; 0 for other shards, and where all rows of text have the same."""
        arrays = self.manifest.fields["text"].arrays
        return np.array([shard.shapes[ATTENTION_MASK][0] if shard.field == "text" and ATTENTION_MASK in arrays else 0
                         for shard in self.shards], np.int64)

    @property
    def masked(self) -> int:
        """The number of samples whose first view has a mask."""
        return int((self.samples.views["mask_shard"][self.samples.view_offsets[:-1]] >= 0).sum())

    @property
    def referring(self) -> bool:
        """Whether samples have reference pictures as conditions."""
        return self.manifest.referring

    @property
    def inpaints(self) -> bool:
        """Whether the model is told by masks what to paint."""
        return self.manifest.inpaints

    @property
    def paired(self) -> bool:
        """Whether samples are pairs of pictures, from which a slider is trained."""
        return self.manifest.paired

    @cached_property
    def seeing(self) -> bool:
        """Whether the text encoder saw the references of samples: then each of these has its own row of no prompt."""
        return self.referring and FAMILIES[self.manifest.family].text.vision is not None

    def unconditional(self, sample: int | None = None) -> RowRef:
        """The row of no prompt of a sample; of none, without references."""
        samples, shown = self.samples, self.samples.reference_offsets
        if sample is not None and self.seeing and shown[sample] < shown[sample + 1]:
            last = int(samples.text_offsets[sample + 1]) - 1
            return self.ref(int(samples.texts["shard"][last]), int(samples.texts["row"][last]))
        return self.ref(**self.manifest.document["prompts"]["unconditional"])

    def mask_of(self, view: int) -> RowRef:
        """The mask of a view that has one."""
        views = self.samples.views
        return self.ref(int(views["mask_shard"][view]), int(views["mask_row"][view]))

    def mask_beside(self, shard: int, row: int) -> RowRef:
        """The mask of the samples whose masked picture's latent, which names its mask, is in this place. Raises
        `CacheError`."""
        latents = self.samples.references  # one of each view, in the order of views
        views = np.flatnonzero((latents["latent_shard"] == shard) & (latents["latent_row"] == row))
        if not len(views):
            raise CacheError(f"{self.manifest.path} has a prompt with a picture that is no sample's",
                             hint="prep prompts FILE --manifest MANIFEST writes its prompts again")
        return self.mask_of(int(views[0]))

    @property
    def black(self) -> int:
        """The number of samples with an entirely black mask."""
        return int((self.samples.coverage == 0).sum())

    @property
    def counts(self) -> list[int]:
        """Occurrences by bucket: samples times their repeats."""
        return [int(ends[-1]) if len(ends) else 0 for ends in self._ends]

    def showings(self, bucket: int, occurrences: Column) -> tuple[list[int], list[int]]:
        """The samples of occurrences, and which of its sample's repeats each is."""
        ends, members = self._ends[bucket], self.training[bucket]
        places = ends.searchsorted(occurrences, side="right")
        samples = members[places]
        return samples.tolist(), (occurrences - (ends[places] - self.samples.repeats[samples])).tolist()

    def samples_of(self, bucket: int, occurrences: Column) -> Column:
        """The samples of occurrences."""
        samples: Column = self.training[bucket][self._ends[bucket].searchsorted(occurrences, side="right")]
        return samples

    def names(self, occurrences: Mapping[int, Column]) -> list[str]:
        """The names of the samples behind occurrences by bucket, each once, sorted."""
        samples = {sample for bucket, some in occurrences.items() for sample in self.samples_of(bucket, some).tolist()}
        return sorted(self.samples.name(sample) for sample in samples)

    def ref(self, shard: int, row: int) -> RowRef:
        """The place of a row, given its shard's number."""
        return RowRef(shard=self.shards[shard].digest, row=row)

    def refs(self, shards: Column, rows: Column) -> list[RowRef]:
        """The places of rows, given their shards' numbers."""
        return [self.ref(shard, row) for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]

    def picture(self, sample: int) -> Path | None:
        """The sample's picture; `None` if it is not a file there: moved, or in a tar or a table."""
        path = self.samples.picture_path(sample, self.manifest.sources)
        return path if path is not None and is_file(path) else None

    def reference(self, sample: int, reference: int) -> Path | None:
        """A reference of the sample, by its number in the columns; `None` if it is not a file there."""
        path = self.samples.reference_path(sample, reference, self.manifest.sources)
        return path if path is not None and is_file(path) else None

    def shape(self, field: str, bucket: int) -> dict[str, tuple[int, ...]]:
        """The shape of every row of `field`, by array; `bucket` determines it for latents and masks."""
        return row_shapes(self.manifest, self.shards, field, self.manifest.buckets[bucket])

    @cached_property
    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of a text row by array, from the first text shard; empty without text shards."""
        return first_shapes(self.shards, "text")


def open_index(manifest: Manifest) -> Index:
    """The index of a manifest's tables. Raises `CacheError` if they are missing, damaged or contradictory."""
    cache = cache_of(manifest)
    shards, samples = read_shards(cache, manifest), read_samples(cache, manifest)
    check_places(manifest, shards, samples)
    return Index(manifest=manifest, cache=cache, samples=samples, shards=shards)


def _reopened(path: Place, digest: str, cache: Place | None) -> Index:
    """The index of the manifest at `path`. Raises `CacheError` if it is not the one with this digest any more."""
    manifest = read_manifest(path, cache=cache)
    if manifest.digest != digest:
        raise CacheError(f"{path} has changed since it was opened: it is {manifest.digest[:12]}, was "
                         f"{digest[:12]}", hint="open it again")
    return open_index(manifest)
