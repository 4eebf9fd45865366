"""A data set that is assumed where there is none: what `prep encode` would make of pictures of a model family.

Pictures are at least as large as their buckets. Their aspect ratios lie evenly between upright and landscape 1:2, of
which each has as many pictures, and each picture has a caption of its own. Buckets, keys, samples and shards are made
of them by the code that encodes, in memory; no file is written. Text rows have the shapes of a published model of the
family.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import pyarrow as pa

from prep.arrays import ArraySpec
from prep.cache.records import RowRef, Task
from prep.cache.remote.shards import RemoteShard
from prep.cache.store import Cache
from prep.dataset.bucketing import buckets_for, rules_of
from prep.dataset.ingest import Ingested, KnownItem
from prep.dataset.samples import settle_masks
from prep.dataset.texts import text_options_of
from prep.digest import canonical, digest_strings
from prep.encode.options import SHARD_BYTES
from prep.encode.plan import plan, rows_of_task
from prep.encode.resolve import ResolvedRecipe
from prep.encode.targets.records import Contexts
from prep.encode.targets.samples import targets_of
from prep.encode.text_groups import TextGroups
from prep.formatting import counted, format_bytes, grouped, listed
from prep.fs.blob import Blob
from prep.geometry import Size
from prep.loader.index import Index
from prep.manifest.document import Field, Manifest
from prep.manifest.samples import SampleColumns, build_samples, open_samples
from prep.manifest.shards import ShardFacts, parse_shards
from prep.manifest.tables import build_shards
from prep.models.configs import Configs
from prep.models.families.registry import FAMILIES
from prep.models.fields import FieldSpecs
from prep.models.fingerprint import digest_file
from prep.recipe.load import load_recipe
from prep.recipe.schema import Recipe, Source
from prep.sources.item import Item

RATIOS = 40  # aspect ratios; a whole multiple of so many pictures has as many of each
STRIDE = 17  # from one picture's ratio to the next one's, so that a few pictures have very different ones
WIDEST = 2  # to 1, and upright
CAPTION = 100  # characters
# Of a published model of a family, what `text.shapes` reads of its configs, by component ("": model_index.json).
PUBLISHED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sd15": {"text_encoder": {"hidden_size": 768}},
    "sd21": {"text_encoder": {"hidden_size": 1024}},
    "sdxl": {"text_encoder": {"hidden_size": 768}, "text_encoder_2": {"hidden_size": 1280, "projection_dim": 1280}},
    "sd3": {"": {"text_encoder_3": ["transformers", "T5EncoderModel"]}, "text_encoder": {"projection_dim": 768},
            "text_encoder_2": {"projection_dim": 1280}, "text_encoder_3": {"d_model": 4096}},
    "flux": {"text_encoder": {"hidden_size": 768}, "text_encoder_2": {"d_model": 4096}},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """What a manifest of samples would say."""

    manifest: Manifest  # without tables
    samples: SampleColumns
    shards: tuple[ShardFacts, ...]
    tables: int  # bytes of the tables of samples and shards

    @property
    def index(self) -> Index:
        """What training opens, without a cache."""
        return Index(manifest=self.manifest, cache=Cache(root=Path("cache")), samples=self.samples, shards=self.shards)


def assumed_pictures(recipe: Recipe, count: int) -> Ingested:
    """So many pictures, with masks if the recipe names where they are."""
    sizes = [_size(number, 2 * max(recipe.image.resolutions)) for number in range(RATIOS)]
    masks = {"none": "", "auto": "", "alpha": "alpha"}.get(str(recipe.mask), "file")
    items = tuple(_picture(number, sizes[number * STRIDE % RATIOS], masks) for number in range(count))
    return Ingested(items=items, findings=(), masks=count if masks == "file" else 0)


def _size(number: int, side: int) -> Size:
    """The size of a picture of the aspect ratio with this number, with about the area of a square of `side`."""
    ratio = WIDEST ** (2 * (number + 0.5) / RATIOS - 1)
    return round(side * sqrt(ratio)), round(side / sqrt(ratio))


def _picture(number: int, size: Size, masks: str) -> KnownItem:
    name, file = f"{number // 1000:06}/{number:012}.jpg", masks == "file"
    mask = Blob(file=f"pictures/{name}-masklabel.png") if file else None
    return KnownItem(
        item=Item(name=name, label=name, source=0, picture=Blob(file=str(Path("pictures") / name)), caption_at=None,
                  mask=mask),
        picture=digest_strings(["picture", str(number)]), size=size, has_alpha=masks == "alpha",
        captions=((f"picture number {number} ".ljust(CAPTION, "."), 1.0),),
        mask=digest_strings(["mask", str(number)]) if file else None)


class PublishedConfigs(Configs):
    """The configs of a model that is not there."""

    def __init__(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(Path("model"))
        self._read = dict(configs)


def assumed_recipe(family: str, choices: Mapping[str, Any]) -> Recipe:
    """The defaults for `family`, with no picture too small, overridden by `choices`, by recipe key."""
    with tempfile.TemporaryDirectory() as empty:
        recipe = load_recipe(Path(empty), choices={"model.family": family, "image.upscale": "allow",
                                                   "image.resolution": FAMILIES[family].resolution, **choices})
    recipe = replace(recipe, sources=(Source(path=Path("pictures")),)).settle_masks(exist=False)
    return replace(recipe, image=replace(recipe.image, min_bucket=1))  # of many pictures no bucket has few


def assumed(family: str, count: int, choices: Mapping[str, Any], model: Path | None = None) -> ResolvedRecipe:
    """So many pictures of a family, as `prep encode` plans them; text rows as wide as those of `model`, if it is named.

    The row of no caption is left out: it is there once, in a data set of any size.
    """
    recipe, facts = assumed_recipe(family, choices), FAMILIES[family]
    configs = PublishedConfigs(PUBLISHED[family]) if model is None else Configs(model)
    options = text_options_of(facts, recipe.model, configs)
    specs = FieldSpecs(family=facts, dtype=recipe.model.dtype, text=facts.text.shapes(configs, options),
                       with_std=recipe.model.posterior == "mean+std")
    surveyed = assumed_pictures(recipe, count)
    recipe = settle_masks(recipe, surveyed.items)
    origin = recipe.mask_origin
    contexts = Contexts(latent={"assumed": 1}, mask=None if origin == "none" else {"assumed": 1, "origin": origin},
                        text={"assumed": 1})
    bucketing = buckets_for(recipe, surveyed)
    targets = targets_of(recipe, surveyed, bucketing, contexts, ())
    texts = {key: target for key, target in targets.texts.items() if key != targets.unconditional}
    tokens = dict.fromkeys(texts, specs.max_tokens if facts.text.layout == "trimmed" else 0)
    groups = TextGroups.known(TextGroups(model or Path("model"), facts, options, {}), tokens)
    return ResolvedRecipe(
        recipe=recipe, model=model or Path("model"), family=family, specs=specs, prediction=facts.predictions[0],
        contexts=contexts, survey=surveyed, bucketing=bucketing, targets=replace(targets, texts=texts),
        text_options=options, text_groups=groups, latents_from=None, file_digest=digest_file)


def lines_of(wanted: ResolvedRecipe, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """What `wanted`, which is assumed, assumes, for people."""
    rows, pictures = [], len(wanted.survey.items)
    for field, keys in wanted.targets.by_field().items():
        sizes = Counter(wanted.row_bytes(field, key) for key in keys)
        if total := sizes.total():
            per_shard = sum(rows_of_task(size, shard_bytes) * count for size, count in sizes.items()) // total
            mean = sum(size * count for size, count in sizes.items()) // total
            each = f"{total / pictures:g} {field} {'row' if total == pictures else 'rows'}"
            rows.append(f"{each} of {format_bytes(mean)} ({grouped(per_shard)} in a shard)")
    trimmed, (rules, *_) = wanted.specs.family.text.layout == "trimmed", rules_of(wanted.recipe)
    sides = listed([str(side) for side in wanted.recipe.image.resolutions])
    return [
        f"assumed: family {wanted.family}, rows in {wanted.recipe.model.dtype}, resolution {sides} in "
        f"{counted(len(wanted.bucketing.buckets), 'bucket')} of step {rules.step}",
        f"assumed: pictures of aspect ratios from 1:{WIDEST} to {WIDEST}:1, evenly, none too small; each with a "
        f"caption of its own, of {CAPTION} characters in {grouped(wanted.specs.max_tokens)} tokens"
        f"{', the most' if trimmed else ''}, and {'no mask' if wanted.recipe.mask_origin == 'none' else 'a mask'}",
        f"assumed: of a picture {listed(rows)}; shards of at most {format_bytes(shard_bytes)}"]


def sealed(wanted: ResolvedRecipe, shard_bytes: int = SHARD_BYTES) -> Sealed:
    """What the manifest of `wanted` would say when all is encoded. Shards have the keys of their tasks for digests."""
    tasks = plan(wanted, None, shard_bytes=shard_bytes, store=False).tasks
    table = build_shards([_shard(wanted, task) for task in tasks])
    shards, samples = parse_shards(table), wanted.targets.samples
    numbers = {facts.digest: number for number, facts in enumerate(shards)}
    refs = {key: RowRef(shard=task.key, row=row) for task in tasks for row, key in enumerate(task.rows)}
    coverage = {sample.id: 0.5 for sample in samples if sample.views[0].mask is not None}
    shapes = tuple(sorted({sample.shape for sample in samples}))
    rows = build_samples(samples, shapes, refs, numbers, coverage)
    fields = {field: Field(context=context, arrays=wanted.specs.as_manifest(field),
                           rows=sum(one.rows for one in shards if one.field == field),
                           shards=sum(one.field == field for one in shards),
                           bytes=sum(one.bytes for one in shards if one.field == field))
              for field, context in wanted.contexts.by_field().items()}
    number = min((one.rows, number) for number, one in enumerate(shards) if one.field == "text")[1]
    document = {"family": wanted.family, "tables": {}, "prompts": {"samples": [], "unconditional": {
        "shard": number, "row": 0}}}  # a text row like any other stands for that of no caption
    manifest = Manifest(path=Path("manifest.json"), base=Path(), document=document, fields=fields, shapes=shapes,
                        buckets=tuple(size for size, _ in shapes))
    return Sealed(manifest=manifest, samples=open_samples(rows), shards=shards,
                  tables=table_bytes(rows) + table_bytes(table))


def table_bytes(table: pa.Table) -> int:
    """The size of the file of a table in a cache."""
    sink = pa.MockOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return int(sink.size())


def _shard(wanted: ResolvedRecipe, task: Task) -> dict[str, Any]:
    """The row of a task's shard in the table of shards."""
    first = task.rows[0]
    bucket = wanted.targets.bucket_of(task.field, first)
    specs: tuple[ArraySpec, ...] = wanted.specs.arrays_of(
        task.field, bucket, None if bucket else wanted.group_of(task.field, first)[1])
    files = RemoteShard(digest=task.key, field=task.field, rows=len(task.rows), bytes=0, arrays=specs).files
    return {"digest": task.key, "field": task.field, "rows": len(task.rows), "bytes": sum(files.values()),
            "shapes": canonical({spec.name: list(spec.shape) for spec in specs}).decode(),
            "dtypes": canonical({spec.name: spec.dtype for spec in specs}).decode()}
