"""A data set that is assumed where there is none yet: what `prep encode` would make of pictures of a model family.

Its pictures are those of `prep.dataset.assumed`; buckets, keys, samples and shards are made of them by the code that
encodes, in memory. Shapes of text rows are those of a model, or of the family's published ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.arrays import ArraySpec
from prep.cache.records import RowRef, Task
from prep.cache.remote.shards import RemoteShard
from prep.dataset.assumed import CAPTION, WIDEST, assumed_pictures
from prep.dataset.bucketing import buckets_for, rules_of
from prep.dataset.samples import settle_masks
from prep.dataset.texts import text_options_of
from prep.digest import canonical
from prep.encode.options import SHARD_BYTES
from prep.encode.plan import plan, rows_of_task
from prep.encode.resolve import ResolvedRecipe
from prep.encode.targets import Contexts, targets_of
from prep.encode.text_groups import TextGroups
from prep.errors import EmptyPlanError, UsageError
from prep.formatting import counted, format_bytes, grouped, listed, printable
from prep.manifest.document import Field, Manifest
from prep.manifest.samples import SampleColumns, build_samples, open_samples
from prep.manifest.shards import ShardFacts, parse_shards
from prep.manifest.tables import build_shards, table_bytes
from prep.models.configs import Configs
from prep.models.families.registry import FAMILIES
from prep.models.fields import FieldSpecs
from prep.models.fingerprint import digest_file
from prep.models.pipeline import infer_family
from prep.parse import Unparsed, one_of
from prep.recipe.load import assumed_recipe
from prep.recipe.schema import Recipe

DEFAULT = "sdxl"


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRows:
    """The rows of a field, as assumed."""

    rows: float  # of a picture
    bytes: int  # of a row, on average
    per_shard: int  # the most rows of a shard, on average


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """What is assumed of a data set, to be said with every plan of it."""

    family: str
    model: str  # whose text rows have these shapes; "": the family's published ones
    dtype: str
    resolutions: tuple[int, ...]
    buckets: int
    step: int
    tokens: int  # of a text row
    trimmed: bool  # whether real rows are only as long as their captions
    fields: Mapping[str, FieldRows]
    shard_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Its part of the documents of `--json`."""
        return {"family": self.family, "model": self.model or None, "dtype": self.dtype,
                "resolutions": list(self.resolutions), "buckets": self.buckets, "step": self.step,
                "caption_characters": CAPTION, "tokens": self.tokens, "shard_bytes": self.shard_bytes,
                "fields": {name: {"rows": one.rows, "bytes": one.bytes, "per_shard": one.per_shard}
                           for name, one in self.fields.items()}}

    def as_lines(self) -> list[str]:
        """The same for people."""
        sides = listed([str(one) for one in self.resolutions])
        of = f"the model {printable(self.model)}" if self.model else ", ".join(FAMILIES[self.family].models)
        rows = [f"{one.rows:g} {name} {'row' if one.rows == 1 else 'rows'} of {format_bytes(one.bytes)} "
                f"({grouped(one.per_shard)} in a shard)" for name, one in self.fields.items()]
        return [
            f"assumed: family {self.family} ({of}), rows in {self.dtype}, resolution {sides} in "
            f"{counted(self.buckets, 'bucket')} of step {self.step}",
            f"assumed: pictures of aspect ratios from 1:{WIDEST} to {WIDEST}:1, evenly, none too small; each with a "
            f"caption of its own, of {CAPTION} characters in {grouped(self.tokens)} tokens"
            f"{', the most' if self.trimmed else ''}, and {'a mask' if 'mask' in self.fields else 'no mask'}",
            f"assumed: of a picture {listed(rows)}; shards of at most {format_bytes(self.shard_bytes)}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """What a manifest of samples would say."""

    manifest: Manifest  # without tables
    samples: SampleColumns
    shards: tuple[ShardFacts, ...]
    tables: int  # bytes of the tables of samples and shards


def family_of(name: str | None, model: Path | None) -> str:
    """The family that is assumed: the one with this name, that of the model, or the default.

    Raises `UsageError` for a family without published widths unless there is a model, or for another than the model's;
    `ModelError`.
    """
    if model is not None:
        found = infer_family(model)
        if name not in (None, found):
            raise UsageError(f"--family is '{printable(name or '')}', but {model} is of the family {found}",
                             hint="omit --family")
        return found
    known = [family.name for family in FAMILIES.values() if family.published is not None]
    try:
        return one_of(name or DEFAULT, known, "--family")
    except Unparsed as error:
        raise UsageError(str(error), hint="any other is planned with a model of it: --model MODEL") from None


def assumed(family: str, model: Path | None, count: int, *, choices: Mapping[str, Any]) -> ResolvedRecipe:
    """So many pictures of a family, as `prep encode` plans them; `choices` override its defaults, by recipe key.

    The row of no caption is left out: it is there once, in a data set of any size.
    Raises `ConfigError`, `ModelError`, `EmptyPlanError`.
    """
    recipe, facts = assumed_recipe(family, FAMILIES[family].resolution, choices=choices), FAMILIES[family]
    rules_of(recipe)
    recipe = replace(recipe, image=replace(recipe.image, min_bucket=1))  # of many pictures no bucket has few
    configs = Configs(model) if model is not None else Configs.known(facts.published or {})
    options = text_options_of(facts, recipe.model, configs)
    specs = FieldSpecs(family=facts, dtype=recipe.model.dtype,  # type: ignore[arg-type]  # checked there
                       text=facts.text.shapes(configs, options), with_std=recipe.model.posterior == "mean+std")
    surveyed = assumed_pictures(recipe, count)
    recipe = settle_masks(recipe, surveyed.items)
    contexts = _contexts(recipe)
    bucketing = buckets_for(recipe, surveyed)
    targets = targets_of(recipe, surveyed, bucketing, contexts, ())
    if not targets.samples:
        raise EmptyPlanError("no assumed picture fits a bucket", hint="leave --upscale out, or name smaller --sizes")
    texts = {key: target for key, target in targets.texts.items() if key != targets.unconditional}
    groups = TextGroups(model or Path("model"), facts, options, {})
    tokens = dict.fromkeys(texts, specs.max_tokens if facts.text.layout == "trimmed" else 0)
    return ResolvedRecipe(
        recipe=recipe, model=model or Path("model"), family=family, specs=specs, prediction=facts.predictions[0],
        contexts=contexts, survey=surveyed, bucketing=bucketing, targets=replace(targets, texts=texts),
        text_options=options, text_groups=TextGroups.known(groups, tokens), latents_from=None,
        file_digest=digest_file)


def _contexts(recipe: Recipe) -> Contexts:
    """Contexts of keys that no cache has."""
    origin = recipe.mask_origin
    return Contexts(latent={"assumed": 1}, mask=None if origin == "none" else {"assumed": 1, "origin": origin},
                    text={"assumed": 1})


def assumptions(wanted: ResolvedRecipe, model: str, shard_bytes: int = SHARD_BYTES) -> Assumed:
    """What `wanted`, which is assumed, assumes; `model` is named in it."""
    pictures, fields = len(wanted.survey.items), {}
    for field, keys in wanted.targets.by_field().items():
        sizes = Counter(wanted.row_bytes(field, key) for key in keys)
        if total := sizes.total():
            fields[field] = FieldRows(
                rows=total / pictures, bytes=sum(size * count for size, count in sizes.items()) // total,
                per_shard=sum(rows_of_task(size, shard_bytes) * count for size, count in sizes.items()) // total)
    trimmed, (rules, *_) = wanted.specs.family.text.layout == "trimmed", rules_of(wanted.recipe)
    return Assumed(family=wanted.family, model=model, dtype=wanted.recipe.model.dtype, step=rules.step,
                   resolutions=wanted.recipe.image.resolutions, buckets=len(wanted.bucketing.buckets),
                   tokens=wanted.specs.max_tokens, trimmed=trimmed, fields=fields, shard_bytes=shard_bytes)


def sealed(wanted: ResolvedRecipe, shard_bytes: int = SHARD_BYTES) -> Sealed:
    """What the manifest of `wanted` would say when all is encoded. Shards have the keys of their tasks for digests."""
    tasks = plan(wanted, None, shard_bytes=shard_bytes, store=False).tasks
    table = build_shards([_shard(wanted, task) for task in tasks])
    shards, samples = parse_shards(table), wanted.targets.samples
    numbers = {facts.digest: number for number, facts in enumerate(shards)}
    refs = {key: RowRef(shard=task.key, row=row) for task in tasks for row, key in enumerate(task.rows)}
    coverage = {sample.id: 0.5 for sample in samples if sample.views[0].mask is not None}
    buckets = wanted.bucketing.buckets
    rows = build_samples(samples, buckets, refs, numbers, coverage)
    fields = {field: Field(context=context, arrays=wanted.specs.as_manifest(field),
                           rows=sum(one.rows for one in shards if one.field == field),
                           shards=sum(one.field == field for one in shards),
                           bytes=sum(one.bytes for one in shards if one.field == field))
              for field, context in wanted.contexts.by_field().items()}
    number = min((one.rows, number) for number, one in enumerate(shards) if one.field == "text")[1]
    document = {"family": wanted.family, "tables": {}, "prompts": {"samples": [], "unconditional": {
        "shard": number, "row": 0}}}  # a text row like any other stands for that of no caption
    manifest = Manifest(path=Path("manifest.json"), folder=Path(), document=document, fields=fields, buckets=buckets)
    return Sealed(manifest=manifest, samples=open_samples(rows), shards=shards,
                  tables=table_bytes(rows) + table_bytes(table))


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
