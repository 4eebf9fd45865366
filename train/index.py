"""The samples of a manifest as numbers: which occur how often in which bucket, and where their rows are.

Everything that could be wrong with a row's place or shape is checked once, here, for all rows at a time; no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from prep.cache.samples import ROLES, SampleColumns, open_samples
from prep.cache.store import Cache, open_cache
from prep.cache.tables import SAMPLES, SHARDS, read_table
from prep.errors import CacheError
from prep.manifest import Manifest
from prep.records import RowRef
from prep.report.words import safe

Column = np.ndarray[Any, Any]
HINT = "prep encode, run again, writes the manifest anew and computes only what is missing"
_VALIDATION = ROLES.index("validation")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFacts:
    """One row of the SHARDS table."""

    digest: str
    field: str
    rows: int
    bytes: int
    shapes: Mapping[str, tuple[int, ...]]  # of one row, by array
    dtypes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Index:
    """Samples, shards, and the order in which a step plan counts them."""

    manifest: Manifest
    cache: Cache
    samples: SampleColumns
    shards: tuple[ShardFacts, ...]

    @cached_property
    def training(self) -> tuple[Column, ...]:
        """The samples to train on, by bucket, in the table's order."""
        trained = self.samples.role != _VALIDATION
        return tuple(np.flatnonzero(trained & (self.samples.bucket == bucket))
                     for bucket in range(len(self.manifest.buckets)))

    @cached_property
    def validation(self) -> tuple[Column, ...]:
        """The samples to validate on, by bucket."""
        held = self.samples.role == _VALIDATION
        return tuple(np.flatnonzero(held & (self.samples.bucket == bucket))
                     for bucket in range(len(self.manifest.buckets)))

    @cached_property
    def _ends(self) -> tuple[Column, ...]:
        """By bucket, how many occurrences its first 1, 2, … samples have."""
        return tuple(np.cumsum(self.samples.repeats[members], dtype=np.int64) for members in self.training)

    @property
    def masked(self) -> int:
        """How many samples have a mask of their own."""
        return int((self.samples.views["mask_shard"][self.samples.view_offsets[:-1]] >= 0).sum())

    @property
    def counts(self) -> list[int]:
        """Occurrences by bucket: samples times their repeats."""
        return [int(ends[-1]) if len(ends) else 0 for ends in self._ends]

    def showing(self, bucket: int, occurrence: int) -> tuple[int, int]:
        """(sample, which of its repeats) of an occurrence."""
        ends, members = self._ends[bucket], self.training[bucket]
        place = int(np.searchsorted(ends, occurrence, side="right"))
        sample = int(members[place])
        return sample, occurrence - (int(ends[place]) - int(self.samples.repeats[sample]))

    def names(self, occurrences: Mapping[int, Column]) -> list[str]:
        """The names of the samples behind occurrences by bucket, each once, sorted."""
        found = {self.showing(bucket, int(each))[0] for bucket, some in occurrences.items() for each in some}
        return sorted(self.samples.name(sample) for sample in found)

    def ref(self, shard: int, row: int) -> RowRef:
        """A place by its shard's number."""
        return RowRef(shard=self.shards[shard].digest, row=row)

    def shape(self, field: str, bucket: int) -> dict[str, tuple[int, ...]]:
        """The shape that every row of `field` has, by array; `bucket` decides it for latents and masks."""
        if field == "text":
            return dict(self.text_shapes)
        width, height = self.manifest.buckets[bucket]
        latents = self.manifest.document["latents"]
        channels = latents["channels"] if field == "latent" else 1
        return {field: (channels, height // latents["factor"], width // latents["factor"])}

    @cached_property
    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of a text row by array, as the first text shard has them; empty without one."""
        return next((shard.shapes for shard in self.shards if shard.field == "text"), {})


def open_index(manifest: Manifest) -> Index:
    """The index of a manifest's tables. Raises `CacheError` when they are missing, damaged or contradictory."""
    if not manifest.cache_root.is_dir():
        raise CacheError(f"{manifest.path} names the cache {manifest.cache_root}, which does not exist",
                         hint="move a manifest together with its cache, or run prep encode again")
    cache = open_cache(manifest.cache_root, create=False)
    tables = manifest.document["tables"]
    shards = tuple(_facts(row) for row in read_table(cache, tables["shards"], SHARDS).to_pylist())
    samples = open_samples(read_table(cache, tables["samples"], SAMPLES))
    index = Index(manifest=manifest, cache=cache, samples=samples, shards=shards)
    _check_places(index)
    return index


def _facts(row: Mapping[str, Any]) -> ShardFacts:
    shapes = {name: tuple(shape) for name, shape in json.loads(row["shapes"]).items()}
    return ShardFacts(digest=row["digest"].hex(), field=row["field"], rows=row["rows"], bytes=row["bytes"],
                      shapes=shapes, dtypes=json.loads(row["dtypes"]))


def _check_places(index: Index) -> None:
    """Raises for the first row whose place or shape is not what its sample needs."""
    samples = index.samples
    if len(samples) and not 0 <= int(samples.bucket.min()) <= int(samples.bucket.max()) < len(index.manifest.buckets):
        raise CacheError("the sample table names a bucket that the manifest does not have", hint=HINT)
    by_view = np.repeat(np.arange(len(samples)), np.diff(samples.view_offsets))
    by_text = np.repeat(np.arange(len(samples)), np.diff(samples.text_offsets))
    if (np.diff(samples.view_offsets) < 1).any() or (np.diff(samples.text_offsets) < 1).any():
        raise CacheError("the sample table has a sample without a view or without a text", hint=HINT)
    _check_field(index, "latent", samples.views["latent_shard"], samples.views["latent_row"], by_view)
    masked = samples.views["mask_shard"] >= 0
    _check_field(index, "mask", samples.views["mask_shard"][masked], samples.views["mask_row"][masked], by_view[masked])
    _check_field(index, "text", samples.texts["shard"], samples.texts["row"], by_text)
    _check_prompts(index)


def _check_prompts(index: Index) -> None:
    prompts = index.manifest.document["prompts"]
    places = [prompts["unconditional"], *(each[name] for each in prompts["samples"]
                                          for name in ("positive", "negative_row"))]
    for place in places:
        facts = index.shards[place["shard"]] if place["shard"] < len(index.shards) else None
        if facts is None or facts.field != "text" or place["row"] >= facts.rows or facts.shapes != index.text_shapes:
            raise CacheError(f"the manifest has a prompt in row {place['row']} of shard number {place['shard']}, where "
                             "there is no text row", hint=HINT)


def _check_field(index: Index, field: str, shard: Column, row: Column, owner: Column) -> None:
    """`owner` is the sample of each place."""
    if not len(shard):
        return
    rows = np.array([facts.rows for facts in index.shards] or [0])
    known = (shard >= 0) & (shard < len(rows))
    bad = ~known | (row < 0) | (row >= rows[np.where(known, shard, 0)])
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise CacheError(f"sample '{_name(index, owner[at])}' has its {field} in row {row[at]} of shard "
                         f"number {shard[at]}, which the manifest's shard table does not have", hint=HINT)
    # One number for shard and bucket: sorting pairs takes a second for a million. Text is the same in every bucket.
    count, dtypes = len(index.manifest.buckets), _dtypes(index, field)
    pairs = shard.astype(np.int64) * count + (0 if field == "text" else index.samples.bucket[owner])
    for pair in np.unique(pairs).tolist():
        number, bucket = divmod(pair, count)
        facts, wanted = index.shards[number], index.shape(field, bucket)
        if facts.field != field or facts.shapes != wanted or facts.dtypes != dtypes:
            at = int(np.flatnonzero(pairs == pair)[0])
            raise CacheError(
                f"sample '{_name(index, owner[at])}' has its {field} in shard {facts.digest[:12]}, which "
                f"holds {facts.field} {_spell(facts.shapes)} {_spell(facts.dtypes)}, expected {field} {_spell(wanted)} "
                f"{_spell(dtypes)}", hint=HINT)


def _name(index: Index, sample: np.int64) -> str:
    return safe(index.samples.name(int(sample)))


def _dtypes(index: Index, field: str) -> dict[str, str]:
    described = index.manifest.fields.get(field)
    return {} if described is None else {name: str(array["dtype"]) for name, array in described.arrays.items()}


def _spell(facts: Mapping[str, Any]) -> str:
    return " ".join(f"{name}:{list(value) if isinstance(value, tuple) else value}" for name, value in facts.items())
