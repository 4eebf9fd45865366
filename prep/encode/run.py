"""Runs `prep encode`, from recipe to report: checks before writing, then want, plan, run, seal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prep.cache.ledger.ledger import is_finished, load_ledger
from prep.cache.remote.working import check_can_encode_to, is_cache, open_to_encode, refresh
from prep.cache.store import Cache, clear_leftovers, leftovers
from prep.dataset.facts import open_facts
from prep.dataset.listing import picture_places
from prep.dataset.texts import TextReading
from prep.encode.assemble import assemble_manifest, fixed_fields, rejected_so_far
from prep.encode.engines.job import Job, Outcome, RayOptions
from prep.encode.forecast.estimate import estimate
from prep.encode.limits import check_manifest_size
from prep.encode.options import EncodeOptions
from prep.encode.plan import EncodePlan, PlanPart, drop_plan, plan
from prep.encode.replaced import Replaced, prompts_for, read_replaced
from prep.encode.report import EncodeReport, errors_of, part_report, report_of
from prep.encode.resolve import ResolvedRecipe, resolve_recipe
from prep.encode.targets import LatentSource
from prep.encode.truncation import Truncated, find_truncated
from prep.errors import CacheError, ConfigError, EmptyPlanError, ModelError, PathError, StoppedError, UsageError
from prep.formatting import counted
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.memo import Memo, dry_run
from prep.fs.paths import NamedPath, check_disjoint, resolve
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import directory_of
from prep.maintenance.recheck import recheck
from prep.maintenance.repair import adopt_orphans, damaged_shards, incomplete_commits, repair_commits, salvage
from prep.manifest.document import Manifest, check_manifest_place
from prep.models.device.named import require_device
from prep.models.hub import locate
from prep.parse import Unparsed
from prep.progress import Progress, phase, silent
from prep.recipe.schema import Recipe
from prep.runtime import GraceOver, StopRequest, gc_disabled, gc_enabled
from prep.setting import check_values

AGAIN = "finished work is kept; run the same command again to continue"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeCall:
    """A call of `prep encode`."""

    recipe: Recipe
    cache: Place
    output: Place
    options: EncodeOptions = field(default_factory=EncodeOptions)
    progress: Progress = silent
    part: PlanPart | None = None  # the share of the plan to encode, without a manifest; None: everything
    ray: RayOptions | None = None  # the cluster that encodes; None: this machine
    latents_from: LatentSource | None = None  # None: the VAE makes latents
    check: Callable[[Prepared], Prepared] | None = None  # what else is done before anything is written


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What is known before the cache is opened: the wanted rows, and the manifest but for their places."""

    call: EncodeCall
    output: Place  # resolved
    wanted: ResolvedRecipe
    model: Path
    facts: Memo
    frame: Mapping[str, Any]  # of the manifest
    prompt_bytes: bytes | None
    replaces: Manifest | None  # that the new one replaces
    truncated: Truncated
    masks_asked: bool


@gc_disabled()
def run_encode(call: EncodeCall) -> EncodeReport:
    """Encodes what is missing and writes the manifest. Raises every kind of `Problem`."""
    try:
        check_values(call.options)
    except Unparsed as error:
        raise UsageError(str(error)) from None
    stop = StopRequest(call.options.grace)
    try:
        with stop.heeded(), dry_run() if call.options.dry_run else nullcontext():
            return _encode(call, stop)
    except GraceOver:
        raise StoppedError(f"stopped by {stop.signal} while no task was under way", hint=AGAIN) from None


def _encode(call: EncodeCall, stop: StopRequest) -> EncodeReport:
    options = call.options
    if call.ray is None and (options.measure or not options.dry_run):  # a plan needs no such GPU
        require_device(options.device, several=True)
    if call.part is not None and (options.retry_rejects or options.recheck):
        flag = "--retry-rejects" if call.options.retry_rejects else "--recheck"
        raise UsageError(f"{flag} is given with --part {call.part}, expected one of them",
                         hint=f"run prep encode {flag} once, without --part: it changes what all parts have to do")
    ready = prepare(call)
    if call.options.dry_run:
        return replace(_dry_run(ready), truncated=ready.truncated)
    if call.check is not None:
        ready = call.check(ready)
    cache = open_to_encode(call.cache, create=True)
    ready.facts.save()
    if call.options.recheck:
        recheck(cache, ready.wanted.targets.keys(), jobs=call.options.jobs, progress=call.progress)
    if call.part is None:
        _clean_up(cache)
    with _planned(ready, cache) as planned:
        outcome = _run(ready, planned, cache, stop)
        report = (write_manifest(ready, cache, planned, outcome) if call.part is None else
                  part_report(call.output, ready.wanted, planned, outcome, call.part,
                              rejected_so_far(ready.wanted, load_ledger(cache))))
    ready.facts.save()
    return replace(report, truncated=ready.truncated)


def prepare(call: EncodeCall) -> Prepared:
    """Resolves the recipe, reads pictures and captions, checks everything that needs no cache; writes nothing."""
    # A link is followed once, for the file and for the paths in it. What is in a store has the place of its copy.
    output, cache = resolve(call.output), call.cache
    check_places(call.recipe, cache, output)
    check_can_encode_to(call.cache)
    model = _model(call)
    old = read_replaced(output)
    recipe, prompt_bytes, prompts, note = prompts_for(call.recipe, old)
    call = replace(call, recipe=replace(recipe, notes=(*recipe.notes, *([note] if note else []))))
    facts = facts_for(cache, trust=not call.options.rehash)
    wanted = resolve_recipe(call.recipe, model, facts, prompts, jobs=call.options.jobs, latents_from=call.latents_from,
                            progress=call.progress)
    call, asked = replace(call, recipe=wanted.recipe), call.recipe.mask_origin != "none"
    frame = fixed_fields(wanted, cache, output)
    _require_samples(call, wanted)
    check_manifest_size(wanted, frame, output)
    reading = TextReading(model=model, family=wanted.specs.family, options=wanted.text_options)
    truncated = find_truncated(wanted.targets, reading, facts, call.progress)
    wanted = replace(wanted, targets=replace(wanted.targets, findings=(*wanted.targets.findings, *truncated.findings)))
    return Prepared(call=call, output=output, wanted=wanted, model=model, facts=facts, frame=frame,
                    prompt_bytes=prompt_bytes, replaces=old, truncated=truncated, masks_asked=asked)


def write_manifest(ready: Prepared, cache: Cache, planned: EncodePlan, outcome: Outcome) -> EncodeReport:
    """Writes the manifest, removes the plan, and reports, while gc can remove no table.

    Raises `CacheError`, `EmptyPlanError`.
    """
    with phase(ready.call.progress, "writing the manifest"):
        sealed = assemble_manifest(ready.wanted, cache, ready.output, frame=ready.frame,
                                   prompt_bytes=ready.prompt_bytes, facts=ready.facts, transient=outcome.transient,
                                   replaces=ready.replaces, found=None if planned.tasks else planned)
    drop_plan(cache, planned, ready.output)
    return report_of(ready.call.output, ready.wanted, planned, outcome, sealed, masks_asked=ready.masks_asked,
                     replaced=Replaced.of(ready.replaces, sealed))


def facts_for(cache: Place, *, trust: bool) -> Memo:
    """What this user's earlier runs read from files for the cache at this path. Raises `PathError`."""
    return open_facts(str(resolve(directory_of(cache))), trust=trust)


def check_places(recipe: Recipe, cache: Place, output: Place) -> None:
    """Raises `PathError` if sources, masks, cache and manifest overlap; before anything is written."""
    places = picture_places(recipe)
    places += [NamedPath(role="masks", path=folder) for folder in recipe.mask_folders]
    places += [NamedPath(role="edits", path=folder) for folder in (recipe.edits,) if folder is not None]
    written = [NamedPath(role="cache", path=cache), NamedPath(role="manifest", path=output)]
    check_disjoint([*places, *written])
    named = {"recipe": recipe.file, "prompts": recipe.prompts, "model": Path(recipe.model.path or "-")}
    for role, path in named.items():
        if path is not None and path.exists():
            for target in written:
                check_disjoint([NamedPath(role=role, path=path), target])
    if isinstance(output, Bucket) and not output.shares_bucket(cache):
        raise PathError(f"the manifest {output} would lie in another place than its cache, {cache}",
                        hint="name a cache in the same bucket; or encode on this computer, and upload the result: prep "
                        "push MANIFEST URL")
    check_manifest_place(output)


def _require_samples(call: EncodeCall, wanted: ResolvedRecipe) -> None:
    if not wanted.targets.samples:
        named = ", ".join(str(source.path) for source in call.recipe.sources)
        errors = errors_of(wanted.targets.findings)
        first = f", the first, {errors[0].path}, {errors[0].detail}" if errors else ""
        unusable = f"; {counted(len(errors), 'picture')} cannot be used{first}" if errors else ""
        raise EmptyPlanError(f"no pictures to encode in {named}{unusable}",
                             hint="prep scan SOURCE gives the reason for each" if errors else
                             "name a directory with pictures, or tar files")
    if call.recipe.mask_origin != "none" and not wanted.targets.masks:
        count, asked = len(wanted.targets.samples), [call.recipe.mask_of(at) for at in range(len(call.recipe.sources))]
        named = ", ".join(dict.fromkeys(str(mask) for mask in asked if mask != "none"))
        raise ConfigError(f"masks are requested ({named}), but none of {counted(count, 'picture')} has one",
                          hint="a mask is NAME-masklabel.png beside its picture, or in the directory of --mask; "
                          "--mask none encodes without masks")


def _clean_up(cache: Cache) -> None:
    """Clears leftovers and salvages damaged shards, unless another process is using the cache."""
    damaged = damaged_shards(cache)
    if not damaged and not leftovers(cache.unsent):
        return
    with suppress(CacheError), lock_directory(cache.root, exclusive=True):
        clear_leftovers(cache.unsent)
        for shard in damaged:
            salvage(cache, shard)


@contextmanager
def _planned(ready: Prepared, cache: Cache) -> Iterator[EncodePlan]:
    """Yields the plan and holds the cache's lock meanwhile, shared with other encoders; gc locks exclusively.

    Incomplete commits are repaired first, under a short exclusive lock. If others use the cache, or this encodes a part
    and others probably will, the repair is left for later, and the rows are encoded again.
    """
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        planned = _plan(ready, cache)
        ill = incomplete_commits(cache, planned.ledger) if ready.call.part is None else []
        if not ill:
            yield planned
            return
    with suppress(CacheError), lock_directory(cache.root, exclusive=True):
        repair_commits(cache, ill)
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        yield _plan(ready, cache)


def _plan(ready: Prepared, cache: Cache) -> EncodePlan:
    """The plan, after intact shards that only lack a commit have received one."""
    call = ready.call

    def planned() -> EncodePlan:
        with phase(call.progress, "looking up rows"):
            return plan(ready.wanted, cache, shard_bytes=call.options.shard_bytes, retry=call.options.retry_rejects,
                        part=call.part)

    first = planned()
    missing = {key for task in first.tasks for key in task.rows}
    return planned() if missing and adopt_orphans(cache, first.ledger, missing, call.progress) else first


def _model(call: EncodeCall) -> Path:
    if not call.recipe.model.path:
        raise ModelError("no model is named, so the encoders are unknown",
                         hint="add --model MODEL, or set path in [model] of the recipe")
    return locate(call.recipe.model.path, download=call.options.download and not call.options.dry_run)


def _run(ready: Prepared, planned: EncodePlan, cache: Cache, stop: StopRequest) -> Outcome:
    """Runs the tasks. Raises `StoppedError` if a signal ended the run before all were finished."""
    outcome = Outcome(encoded={}, transient=())
    if not planned.tasks:
        return outcome
    job = _job(ready, planned, cache)
    with gc_enabled(), suppress(GraceOver), stop.completing(job.claims.stop):
        outcome = _executed(job, ready.call)
    left = [task for task in planned.tasks if not is_finished(cache, task.key)] if stop.signal else []
    if left:
        raise StoppedError(f"stopped by {stop.signal}: {len(planned.tasks) - len(left)} of "
                           f"{counted(len(planned.tasks), 'task')} finished; "
                           f"{counted(sum(len(task.rows) for task in left), 'row')} left to encode", hint=AGAIN)
    return outcome


def _executed(job: Job, call: EncodeCall) -> Outcome:
    if call.ray is not None:
        from prep.encode.engines import ray  # here: it needs an extra

        outcome = ray.run(job, call.ray, call.progress)
        refresh(job.cache)  # workers have copies of their own
        return outcome
    from prep.encode.engines import devices  # here: a run with nothing to do loads no engine and no torch

    return devices.run(job, call.progress)


def _job(ready: Prepared, planned: EncodePlan, cache: Cache) -> Job:
    call, wanted, source, options = ready.call, ready.wanted, ready.wanted.latents_from, ready.call.options
    return Job(cache=cache, model=ready.model,
              latents=None if source is None else source.rows(wanted.specs.family, wanted.specs.dtype,
                                                              ready.frame["latents"]),
               vae=wanted.expected("latent", "vae"), text=wanted.expected("text", "text"),
              specs=wanted.specs, targets=wanted.targets, tasks=planned.tasks,
              text_options=wanted.text_options, text_groups=wanted.text_groups,
              alpha=call.recipe.image.alpha, origin=call.recipe.mask_origin,
              compute={name: str(wanted.contexts.by_field()[name].get("compute", "")) for name in ("latent", "text")},
              tile=call.recipe.model.tile, device=options.device, encoder_memory=options.encoder_memory,
              batch_size=options.batch_size, jobs=options.jobs, compiled=options.compiled,
              max_rejects=max(10, len(wanted.targets.samples) // 100) if options.max_rejects is None
              else options.max_rejects)


def _dry_run(ready: Prepared) -> EncodeReport:
    call, wanted = ready.call, ready.wanted
    cache = open_to_encode(call.cache, create=False) if is_cache(call.cache) else None
    if call.options.recheck and cache is not None:
        recheck(cache, wanted.targets.keys(), jobs=call.options.jobs, progress=call.progress)
    planned = plan(wanted, cache, shard_bytes=call.options.shard_bytes, retry=call.options.retry_rejects, store=False,
                   part=call.part)
    measured = None
    if call.options.measure and planned.tasks:
        from prep.encode.engines.measure import measure  # here: it imports torch

        with gc_enabled():
            measured = measure(_job(ready, planned, cache or Cache(root=directory_of(call.cache))), call.progress)
    rejected = () if call.options.retry_rejects else rejected_so_far(wanted, planned.ledger)
    return EncodeReport(estimate=estimate(wanted, planned, cache, measured), manifest=call.output,
                        encoded=planned.missing, reused=planned.reused, bytes=planned.bytes,
                        rejected=(*errors_of(wanted.targets.findings), *rejected), notices=wanted.targets.notices,
                        samples={}, dry_run=True, part=call.part)
