"""Reads a manifest's tables and checks them against the manifest and each other, for inspect, verify and train.

The tables are untrusted, even with a valid digest. After the checks every index is in range, every row has its bucket's
shape, and no number is NaN. Vectorized: a million samples take a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prep.batching.split import ROLES
from prep.cache.ledger.columns import Column
from prep.cache.remote.shards import register
from prep.cache.store import Cache, cache_at, open_cache
from prep.errors import CacheError
from prep.findings import SEVERITIES
from prep.formatting import format_bucket, printable
from prep.geometry import Size
from prep.keys import SeenPicture
from prep.manifest.document import Manifest
from prep.manifest.samples import SampleColumns, ShownPicture, open_samples
from prep.manifest.schema import MOST_SIDE
from prep.manifest.shards import HINT, ShardFacts, parse_shards
from prep.manifest.tables import EMBEDDING, FINDINGS, SHARDS, read_table, samples_schema
from prep.models.families.registry import FAMILIES
from prep.models.family import ATTENTION_MASK, TOKEN
from prep.parse import color_below

MOST_REPEATS = 1 << 20  # times an epoch shows a sample; recipes allow 10,000
MOST_WEIGHT = 1e6  # of a sample or a text; recipes allow 1000


def cache_of(manifest: Manifest) -> Cache:
    """The cache of a manifest. Raises `CacheError` if it is not there, or is no cache of this version."""
    if not manifest.cache_root.is_dir():
        raise CacheError(f"the cache of {manifest.path}, {manifest.cache}, does not exist",
                         hint="name where it is now with --cache CACHE, or run prep encode again; a run's "
                         "manifest.json is a copy: copy it to where that manifest lay, and name it there")
    open_cache(manifest.cache_root, create=False)
    return cache_at(manifest.cache)


def read_shards(cache: Cache, manifest: Manifest) -> tuple[ShardFacts, ...]:
    """The shards in the manifest's SHARDS table. Raises `CacheError`."""
    shards = parse_shards(read_table(cache, manifest.document["tables"]["shards"], SHARDS))
    register(cache, (facts.remote for facts in shards))
    return shards


def read_samples(cache: Cache, manifest: Manifest) -> SampleColumns:
    """The manifest's samples, each value checked except the places of rows. Raises `CacheError`."""
    schema = samples_schema(manifest.shapes, embedded=manifest.embedded)
    samples = open_samples(read_table(cache, manifest.document["tables"]["samples"], schema))
    _require_masked(manifest)
    _require(_rules(samples, manifest))
    _check_counts(samples, manifest)
    return samples


def _require_masked(manifest: Manifest) -> None:
    """Raises `CacheError` unless samples of a family that inpaints have their own masked picture as their reference,
    and those of pairs the other picture."""
    if manifest.inpaints or manifest.paired:
        for size, references in manifest.shapes:
            if references != (size,):
                raise CacheError(f"{manifest.path} has the bucket {format_bucket((size, references))}, expected one "
                                 f"reference of its size in family '{manifest.family}'"
                                 f"{', of pairs' if manifest.paired else ''}", hint=HINT)


def read_findings(cache: Cache, manifest: Manifest) -> list[dict[str, str]]:
    """The manifest's findings: path, code, severity, detail. Raises `CacheError`."""
    rows: list[dict[str, str]] = read_table(cache, manifest.document["tables"]["findings"], FINDINGS).to_pylist()
    for row in rows:
        if row["severity"] not in SEVERITIES:
            seen = printable(row["severity"][:80])
            raise CacheError(f"the finding table has the severity '{seen}', expected one of: {', '.join(SEVERITIES)}",
                             hint=HINT)
    return rows


Rule = tuple[str, Column, Column, str]  # column, its values, which of them are valid, what is expected


def _require(rules: Iterator[Rule]) -> None:
    for column, values, good, wanted in rules:
        if not good.all():
            at = int(np.flatnonzero(~good)[0])
            raise CacheError(f"the sample table has {column} {values[at]} at index {at}, expected {wanted}", hint=HINT)


def _rules(samples: SampleColumns, manifest: Manifest) -> Iterator[Rule]:
    ids, views, texts = samples.ids.view("S32").reshape(-1), samples.views, samples.texts
    rising = np.ones(len(samples), bool)
    rising[1:] = ids[:-1] < ids[1:]
    yield "id number", np.arange(len(samples)), rising, "ids in ascending order, each once"
    for name, values in (("view count", samples.view_offsets), ("text count", samples.text_offsets)):
        counts = np.diff(values)
        yield name, counts, counts > 0, "at least 1"
    yield "role number", samples.role, samples.role < len(ROLES), f"one of {', '.join(ROLES)}"
    yield from _between("source", samples.source, 0, len(manifest.sources) - 1)
    yield from _between("bucket", samples.bucket, 0, len(manifest.buckets) - 1)
    yield from _between("repeats", samples.repeats, 1, MOST_REPEATS)
    yield from _between("weight", samples.weight, 0, MOST_WEIGHT)
    yield from _between("text weight", texts["weight"], 0, MOST_WEIGHT)
    for name in ("width", "height"):
        yield from _between(name, getattr(samples, name), 1, np.iinfo(np.int32).max)
    known = samples.table["coverage"].is_valid().to_numpy()  # in the column, null became NaN
    yield "coverage", samples.coverage, ~known | ((samples.coverage >= 0) & (samples.coverage <= 1)), "null, or 0 to 1"
    shard, none = views["mask_shard"], views["mask_shard"] == -1
    yield "mask_shard", shard, (shard >= -1) & (none == (views["mask_row"] == -1)), "a shard, or -1 with row -1"
    embedding, row = (samples.embeddings[name] for name in EMBEDDING)
    yield "embedding_shard", embedding, (embedding >= -1) & ((embedding == -1) == (row == -1)), \
        "a shard, or -1 with row -1"
    if manifest.inpaints:
        yield "mask_shard", shard, ~none, "a shard, as a model that inpaints needs"
    counts = np.diff(samples.reference_offsets)
    each = np.array([len(references) for _, references in manifest.shapes] or [0])[samples.bucket]
    as_bucket = counts == each * np.diff(samples.view_offsets)
    yield "reference count", counts, as_bucket, "as many for each view as its bucket"
    for name in ("width", "height"):
        yield from _between(f"reference {name}", samples.references[name], 1, np.iinfo(np.int32).max)


def _placements(samples: SampleColumns, sizes: Column, of_references: Column) -> Iterator[Rule]:
    """Checks that the crop of each view, and of each reference, lies within the scaled picture."""
    for what, columns, cut in (("", samples.views, sizes), ("reference ", samples.references, of_references)):
        for axis, scaled, crop in ((0, "scaled_width", "crop_x"), (1, "scaled_height", "crop_y")):
            first, whole = columns[crop].astype(np.int64), columns[scaled]
            yield f"{what}{crop}", first, (first >= 0) & (first + cut[:, axis] <= whole), \
                "a crop within the scaled picture"


def view_sizes(manifest: Manifest, samples: SampleColumns) -> Column:
    """[V, 2]: width and height of the latents' pictures of all views, in the order of the table."""
    of_buckets = np.array(manifest.buckets, np.int64).reshape(-1, 2)
    sizes: Column = of_buckets[np.repeat(samples.bucket, np.diff(samples.view_offsets))]
    return sizes


def reference_sizes(manifest: Manifest, samples: SampleColumns) -> Column:
    """[R, 2]: width and height of the latents' pictures of all references, in the order of the table."""
    counts = np.array([len(references) for _, references in manifest.shapes] or [0], np.int64)
    sizes = np.array([size for _, references in manifest.shapes for size in references], np.int64).reshape(-1, 2)
    of_views = np.repeat(samples.bucket, np.diff(samples.view_offsets)) if len(sizes) else np.empty(0, np.int64)
    each = counts[of_views]
    places = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    sides: Column = sizes[np.repeat((np.cumsum(counts) - counts)[of_views], each) + places]
    return sides


def shown_pictures(manifest: Manifest, samples: SampleColumns, sample: int) -> Sequence[ShownPicture]:
    """The references of a sample as conditions, beside its first view: none of pairs."""
    return () if manifest.paired else samples.shown_with(sample, manifest.shapes[int(samples.bucket[sample])][1])


def seen_ways(manifest: Manifest, references: Sequence[ShownPicture]) -> list[tuple[SeenPicture, ...]]:
    """All that may be in the key of a text with these references: a manifest does not say which are transparent. Empty:
    the text encoder cannot see one of them."""
    vision, color = FAMILIES[manifest.family].text.vision, color_below(manifest.alpha)
    if vision is None or not references:
        return [()]
    ways: list[tuple[SeenPicture, ...]] = [()]
    for digest, size, placement in references:
        place = vision.place(size, placement)
        ways = [] if place is None else [
            (*way, SeenPicture(picture=digest, placement=place, alpha=alpha))
            for way in ways for alpha in ((None,) if color is None else (None, color))]
    return ways


def _between(column: str, values: Column, low: float, high: float) -> Iterator[Rule]:
    yield column, values, (values >= low) & (values <= high), f"a number from {low} to {high}"


def _check_counts(samples: SampleColumns, manifest: Manifest) -> None:
    """Raises `CacheError` unless the manifest's counts by bucket and role match the table."""
    actual = np.bincount(samples.bucket.astype(np.int64) * len(ROLES) + samples.role,
                         minlength=len(manifest.buckets) * len(ROLES)).reshape(-1, len(ROLES))
    stated = [[bucket[role] for role in ROLES] for bucket in manifest.document["buckets"]]
    for shape, expected, counts in zip(manifest.shapes, actual.tolist(), stated, strict=True):
        if expected != counts:
            raise CacheError(f"the sample table has {expected} samples of {format_bucket(shape)} ({', '.join(ROLES)}), "
                             f"expected {counts}, as in the manifest", hint=HINT)


# ---- places ----------------------------------------------------------------------------------------------------------


def first_shapes(shards: Sequence[ShardFacts], field: str) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a row of text, or of an embedding, by array, from the field's first shard; empty without one."""
    return next((shard.shapes for shard in shards if shard.field == field), {})


def row_shapes(manifest: Manifest, shards: Sequence[ShardFacts], field: str, size: Size) -> dict[str, tuple[int, ...]]:
    """The shape of every row of `field`, by array; a picture's `size` determines it for latents and masks."""
    if field == "embedding":
        return {name: shape[:1] for name, shape in first_shapes(shards, field).items()}
    if field == "text":
        return dict(first_shapes(shards, field))
    width, height = size
    latents = manifest.document["latents"]
    channels = latents["channels"] if field == "latent" else FAMILIES[manifest.family].mask_channels
    shape = (channels, height // latents["factor"], width // latents["factor"])
    arrays = manifest.fields[field].arrays if field in manifest.fields else (field,)
    return dict.fromkeys(arrays, shape)


def is_shape_of(manifest: Manifest, field: str, shapes: Mapping[str, tuple[int, ...]],
                wanted: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a shard's rows have the shapes that `row_shapes` says; trimmed text rows may have any number of tokens.
    """
    if field != "text" or FAMILIES[manifest.family].text.layout == "full" or shapes.keys() != wanted.keys():
        return shapes == wanted
    dims = FAMILIES[manifest.family].text.arrays
    tokens = shapes.get(ATTENTION_MASK)
    return tokens is not None and len(tokens) == 1 and all(
        shapes[name] == tuple(tokens[0] if dim == TOKEN else side for dim, side in zip(dims[name], shape, strict=True))
        for name, shape in wanted.items() if name != ATTENTION_MASK)


def check_places(manifest: Manifest, shards: Sequence[ShardFacts], samples: SampleColumns) -> None:
    """Raises `CacheError` for the first row whose place or shape does not fit its sample."""
    by_view = np.repeat(np.arange(len(samples)), np.diff(samples.view_offsets))
    by_text = np.repeat(np.arange(len(samples)), np.diff(samples.text_offsets))
    views, texts = samples.views, samples.texts
    masked = views["mask_shard"] >= 0
    check, sizes = _Places(manifest, shards, samples), view_sizes(manifest, samples)
    of_references = reference_sizes(manifest, samples)
    check.field("latent", views["latent_shard"], views["latent_row"], by_view, sizes)
    check.field("mask", views["mask_shard"][masked], views["mask_row"][masked], by_view[masked], sizes[masked])
    check.field("latent", samples.references["latent_shard"], samples.references["latent_row"],
                np.repeat(np.arange(len(samples)), np.diff(samples.reference_offsets)),
                of_references)
    check.field("text", texts["shard"], texts["row"], by_text, None)
    shard, row = (samples.embeddings[name] for name in EMBEDDING)
    embedded = np.flatnonzero(shard >= 0)
    check.field("embedding", shard[embedded], row[embedded], embedded, None)
    check.prompts()
    _require(_placements(samples, sizes, of_references))


class _Places:
    """Checks the places of a manifest's rows against its shards and samples."""

    def __init__(self, manifest: Manifest, shards: Sequence[ShardFacts], samples: SampleColumns) -> None:
        self.manifest = manifest
        self.shards = shards
        self.samples = samples

    def field(self, field: str, shard: Column, row: Column, owner: Column, sizes: Column | None) -> None:
        """Checks the places of one field; `owner` is the sample of each place, and `sizes` [n, 2] the size of its
        picture, of which the shapes of text and embeddings are independent. Raises `CacheError`."""
        if not len(shard):
            return
        rows = np.array([facts.rows for facts in self.shards] or [0])
        known = (shard >= 0) & (shard < len(rows))
        bad = ~known | (row < 0) | (row >= rows[np.where(known, shard, 0)])
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise CacheError(f"sample '{self._name(owner[at])}' has its {field} in row {row[at]} of shard "
                             f"number {shard[at]}, which the manifest's shard table does not have", hint=HINT)
        # One number for shard and size: sorting a million pairs takes a second.
        dtypes, side = self._dtypes(field), MOST_SIDE + 1
        pairs = shard.astype(np.int64)
        if sizes is not None:
            pairs = (pairs * side + sizes[:, 0]) * side + sizes[:, 1]
        for pair in np.unique(pairs).tolist():
            rest, height = divmod(pair, side) if sizes is not None else (pair, 0)
            number, width = divmod(rest, side) if sizes is not None else (rest, 0)
            facts, wanted = self.shards[number], row_shapes(self.manifest, self.shards, field, (width, height))
            if facts.field != field or not self._fits(facts, wanted) or facts.dtypes != dtypes:
                who = self._name(owner[np.flatnonzero(pairs == pair)[0]])
                raise CacheError(
                    f"sample '{who}' has its {field} in shard {facts.digest[:12]}, which "
                    f"holds {facts.field} {_spell(facts.shapes)} {_spell(facts.dtypes)}, expected {field} "
                    f"{_spell(wanted)} {_spell(dtypes)}", hint=HINT)

    def prompts(self) -> None:
        """Checks that the manifest's own prompts are text rows. Raises `CacheError`."""
        prompts, shapes = self.manifest.document["prompts"], first_shapes(self.shards, "text")
        for place in (prompts["unconditional"], *(each[name] for each in prompts["samples"]
                                                  for name in ("positive", "negative_row"))):
            facts = self.shards[place["shard"]] if place["shard"] < len(self.shards) else None
            if (facts is None or facts.field != "text" or place["row"] >= facts.rows or not self._fits(facts, shapes)
                    or facts.dtypes != self._dtypes("text")):
                raise CacheError(f"the manifest has a prompt in row {place['row']} of shard number {place['shard']}, "
                                 "which is not a text row of the expected shape", hint=HINT)

        for reference in (each for prompt in prompts["samples"] for each in prompt.get("references", ())):
            self._prompt_picture(reference, "latent", reference["bucket"])
            if "mask" in reference:
                self._prompt_picture(reference["mask"], "mask", reference["bucket"])

    def _prompt_picture(self, place: Mapping[str, Any], field: str, bucket: Sequence[int]) -> None:
        """Checks the row of a prompt's reference, or of its mask. Raises `CacheError`."""
        facts = self.shards[place["shard"]] if place["shard"] < len(self.shards) else None
        wanted = row_shapes(self.manifest, self.shards, field, (bucket[0], bucket[1]))
        if (facts is None or facts.field != field or place["row"] >= facts.rows
                or facts.shapes != wanted or facts.dtypes != self._dtypes(field)):
            raise CacheError(f"the manifest has a prompt's reference in row {place['row']} of shard number "
                             f"{place['shard']}, which is not a {field} of the expected shape", hint=HINT)

    def _fits(self, facts: ShardFacts, wanted: Mapping[str, tuple[int, ...]]) -> bool:
        return is_shape_of(self.manifest, facts.field, facts.shapes, wanted)

    def _name(self, sample: np.int64) -> str:
        return printable(self.samples.name(int(sample))[:200])

    def _dtypes(self, field: str) -> dict[str, str]:
        described = self.manifest.fields.get(field)
        return {} if described is None else {name: str(array["dtype"]) for name, array in described.arrays.items()}


def _spell(facts: Mapping[str, Any]) -> str:
    return " ".join(f"{name}:{list(value) if isinstance(value, tuple) else value}" for name, value in facts.items())
