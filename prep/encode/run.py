"""Runs `prep encode`, from recipe to report: checks before writing, then want, plan, run, seal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prep.cache.store import Cache, check_can_create, clear_leftovers, leftovers, open_cache
from prep.dataset.facts import VERSION
from prep.dataset.listing import picture_places
from prep.encode.assemble import assemble_manifest, fixed_fields
from prep.encode.engines.job import Job, Outcome
from prep.encode.estimate import estimate
from prep.encode.limits import check_manifest_size, read_small_prompts
from prep.encode.plan import EncodePlan, drop_plan, plan
from prep.encode.report import EncodeReport
from prep.encode.resolve import ResolvedRecipe, resolve_recipe
from prep.encode.truncation import TextReading, find_truncated
from prep.errors import CacheError, ConfigError, EmptyPlanError, ModelError
from prep.findings import Finding
from prep.formatting import counted, join_names
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.memo import Memo, dry_run, memo_path
from prep.fs.paths import MARKER, NamedPath, check_disjoint, check_replaceable, resolve
from prep.maintenance.recheck import recheck
from prep.maintenance.repair import adopt_orphans, damaged_shards, incomplete_commits, repair_commits, salvage
from prep.manifest.document import Manifest, looks_like_manifest
from prep.manifest.opened import findings_of, open_manifest
from prep.models.hub import locate
from prep.progress import Progress
from prep.recipe.schema import Recipe
from prep.runtime import gc_disabled, gc_enabled


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeCall:
    """A call of `prep encode`."""

    recipe: Recipe
    cache: Path
    output: Path
    device: str
    batch_size: int
    jobs: int
    shard_bytes: int
    max_rejects: int | None
    rehash: bool
    download: bool
    dry_run: bool
    progress: Progress
    retry_rejects: bool = False
    recheck: bool = False  # verify what is reused
    measure: bool = False  # with dry_run: encode a few rows to estimate time and memory
    compiled: bool = False  # whether encoders are compiled
    encoder_memory: int | None = None  # bytes of the device for the weights of a text encoder; None: no limit


@gc_disabled()
def run_encode(call: EncodeCall) -> EncodeReport:
    """Encodes what is missing and writes the manifest. Raises every kind of `Problem` but `EmptyPlanError`."""
    with dry_run() if call.dry_run else nullcontext():
        return _encode(call)


def _encode(call: EncodeCall) -> EncodeReport:
    output = resolve(call.output)  # a link is followed once, for the file and for the paths in it
    check_places(call.recipe, call.cache, output)
    check_can_create(call.cache)
    model = _model(call)
    named = call.recipe.prompts
    prompt_bytes, prompts = (None, []) if named is None else read_small_prompts(named)
    facts = open_facts(call.cache, trust=not call.rehash)
    wanted = resolve_recipe(call.recipe, model, facts, prompts, jobs=call.jobs, progress=call.progress)
    call, asked = replace(call, recipe=wanted.recipe), call.recipe.mask_origin != "none"
    frame = fixed_fields(wanted, call.cache, output)
    _require_samples(call, wanted)
    check_manifest_size(wanted, frame, output)
    reading = TextReading(model=model, family=wanted.specs.family, options=wanted.text_options)
    truncated = find_truncated(wanted.wants, reading, facts, call.progress)
    wanted = replace(wanted, wants=replace(wanted.wants, findings=(*wanted.wants.findings, *truncated.findings)))
    if call.dry_run:
        return replace(_dry_run(call, wanted), truncated=truncated)
    cache = open_cache(call.cache, create=True)
    facts.save()
    if call.recheck:
        recheck(cache, wanted.wants.keys(), jobs=call.jobs, progress=call.progress)
    _clean_up(cache)
    with _planned(call, wanted, cache) as planned:
        outcome = _run(call, wanted, planned, cache, model)
        sealed = assemble_manifest(wanted, cache, output, frame=frame, prompt_bytes=prompt_bytes, facts=facts,
                                   transient=outcome.transient, found=None if planned.tasks else planned)
        drop_plan(cache, planned, output)
        report = _report(call, wanted, planned, outcome, sealed, asked)  # while gc can remove no table
    facts.save()
    return replace(report, truncated=truncated)


def open_facts(cache: Path, *, trust: bool) -> Memo:
    """The memo of files that this user's earlier runs read for the cache at this path. Raises `PathError`."""
    return Memo(memo_path("files", str(VERSION), scope=str(resolve(cache))), trust=trust, preload=True)


def check_places(recipe: Recipe, cache: Path, output: Path) -> None:
    """Raises `PathError` if sources, masks, cache and manifest overlap; before anything is written."""
    places = picture_places(recipe)
    places += [NamedPath(role="masks", path=folder) for folder in recipe.mask_folders]
    written = [NamedPath(role="cache", path=cache), NamedPath(role="manifest", path=output)]
    check_disjoint([*places, *written])
    named = {"recipe": recipe.file, "prompts": recipe.prompts, "model": Path(recipe.model.path or "-")}
    for role, path in named.items():
        if path is not None and path.exists():
            for target in written:
                check_disjoint([NamedPath(role=role, path=path), target])
    check_replaceable(output, "manifest", looks_like_manifest)


def _require_samples(call: EncodeCall, wanted: ResolvedRecipe) -> None:
    if not wanted.wants.samples:
        named = ", ".join(str(source.path) for source in call.recipe.sources)
        errors = _errors(wanted.wants.findings)
        first = f", the first, {errors[0].path}, {errors[0].detail}" if errors else ""
        unusable = f"; {counted(len(errors), 'picture')} cannot be used{first}" if errors else ""
        raise EmptyPlanError(f"no pictures to encode in {named}{unusable}",
                             hint="prep scan SOURCE gives the reason for each" if errors else
                             "name a directory with pictures, or tar files")
    if call.recipe.mask_origin != "none" and not wanted.wants.masks:
        count, asked = len(wanted.wants.samples), [call.recipe.mask_of(at) for at in range(len(call.recipe.sources))]
        named = ", ".join(dict.fromkeys(str(mask) for mask in asked if mask != "none"))
        raise ConfigError(f"masks are requested ({named}), but none of {counted(count, 'picture')} has one",
                          hint="a mask is NAME-masklabel.png beside its picture, or in the directory of --mask; "
                          "--mask none encodes without masks")


def _clean_up(cache: Cache) -> None:
    """Clears leftovers and salvages damaged shards, unless another process is using the cache."""
    damaged = damaged_shards(cache)
    if not damaged and not leftovers(cache):
        return
    with suppress(CacheError), lock_directory(cache.root, exclusive=True):
        clear_leftovers(cache)
        for shard in damaged:
            salvage(cache, shard)


@contextmanager
def _planned(call: EncodeCall, wanted: ResolvedRecipe, cache: Cache) -> Iterator[EncodePlan]:
    """Yields the plan and holds the cache's lock meanwhile, shared with other encoders; gc locks exclusively.

    Incomplete commits are repaired first, under a short exclusive lock. If others use the cache, the repair is left
    for later, and the rows are encoded again.
    """
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        planned = _plan(call, wanted, cache)
        ill = incomplete_commits(cache, planned.ledger)
        if not ill:
            yield planned
            return
    with suppress(CacheError), lock_directory(cache.root, exclusive=True):
        repair_commits(cache, ill)
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        yield _plan(call, wanted, cache)


def _plan(call: EncodeCall, wanted: ResolvedRecipe, cache: Cache) -> EncodePlan:
    """The plan, after intact shards that only lack a commit have received one."""
    planned = plan(wanted, cache, shard_bytes=call.shard_bytes, retry=call.retry_rejects)
    missing = {key for task in planned.tasks for key in task.rows}
    if missing and adopt_orphans(cache, planned.ledger, missing):
        return plan(wanted, cache, shard_bytes=call.shard_bytes, retry=call.retry_rejects)
    return planned


def _model(call: EncodeCall) -> Path:
    if not call.recipe.model.path:
        raise ModelError("no model is named, so the encoders are unknown",
                         hint="add --model MODEL, or set path in [model] of the recipe")
    return locate(call.recipe.model.path, download=call.download and not call.dry_run)


def _run(call: EncodeCall, wanted: ResolvedRecipe, planned: EncodePlan, cache: Cache, model: Path) -> Outcome:
    if not planned.tasks:
        return Outcome(encoded={}, transient=())
    from prep.encode.engines.devices import run  # here: a run with nothing to do loads no engine and no torch

    with gc_enabled():
        return run(_job(call, wanted, planned, cache, model), call.progress)


def _job(call: EncodeCall, wanted: ResolvedRecipe, planned: EncodePlan, cache: Cache, model: Path) -> Job:
    return Job(cache=cache, model=model, vae=wanted.expected("latent", "vae"), text=wanted.expected("text", "text"),
              specs=wanted.specs, wants=wanted.wants, tasks=planned.tasks,
              text_options=wanted.text_options, text_groups=wanted.text_groups,
              alpha=call.recipe.image.alpha, origin=call.recipe.mask_origin,
              compute={name: str(wanted.contexts.by_field()[name]["compute"]) for name in ("latent", "text")},
              tile=call.recipe.model.tile, device=call.device, encoder_memory=call.encoder_memory,
              batch_size=call.batch_size, jobs=call.jobs, compiled=call.compiled,
              max_rejects=max(10, len(wanted.wants.samples) // 100) if call.max_rejects is None else call.max_rejects)


def _dry_run(call: EncodeCall, wanted: ResolvedRecipe) -> EncodeReport:
    cache = open_cache(call.cache, create=False) if (call.cache / MARKER).exists() else None
    if call.recheck and cache is not None:
        recheck(cache, wanted.wants.keys(), jobs=call.jobs, progress=call.progress)
    planned = plan(wanted, cache, shard_bytes=call.shard_bytes, retry=call.retry_rejects, store=False)
    measured = None
    if call.measure and planned.tasks:
        from prep.encode.engines.measure import measure  # here: it imports torch

        with gc_enabled():
            measured = measure(_job(call, wanted, planned, cache or Cache(root=call.cache), wanted.model),
                               call.progress)
    return EncodeReport(estimate=estimate(wanted, planned, cache, measured),
                        manifest=call.output, encoded=planned.missing, reused=planned.reused, bytes=planned.bytes,
                        rejected=_errors(wanted.wants.findings), notices=wanted.wants.notices, samples={}, dry_run=True)


def _report(call: EncodeCall, wanted: ResolvedRecipe, planned: EncodePlan, outcome: Outcome,
            sealed: Manifest, asked: bool) -> EncodeReport:
    encoded = {field: outcome.encoded.get(field, 0) for field in planned.missing}
    used, black = _masked(call, sealed)
    masks = {"found": _masks_found(wanted), "used": used}
    return EncodeReport(manifest=call.output, encoded=encoded, reused=planned.reused, bytes=planned.bytes,
                        rejected=_errors(findings_of(sealed)),
                        notices=(*wanted.wants.notices, *outcome.notices, *black),
                        samples=sealed.document["samples"], dry_run=False, masks=masks if asked else None)


def _masks_found(wanted: ResolvedRecipe) -> int:
    """How many masks there are: files, or pictures with transparency."""
    return (sum(one.has_alpha for one in wanted.survey.items) if wanted.recipe.mask_origin == "alpha"
            else wanted.survey.masks)


def _masked(call: EncodeCall, sealed: Manifest) -> tuple[int, list[str]]:
    """How many pictures of the manifest have a mask, and a notice if masks are entirely black."""
    if call.recipe.mask_origin == "none":
        return 0, []
    samples = open_manifest(sealed).samples
    masked = (~np.isnan(samples.coverage)).nonzero()[0]
    pictures = {(int(samples.source[number]), samples.name(int(number))) for number in masked}
    black = [samples.name(int(number)) for number in (samples.coverage == 0).nonzero()[0]]
    return len(pictures), [f"{counted(len(black), 'mask')} entirely black; with masked loss "
                           f"{'this sample' if len(black) == 1 else 'these samples'} would not train: "
                           f"{join_names(black, 8)}"] if black else []


def _errors(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    return tuple(one for one in findings if one.severity == "error")
