"""Runs the tasks of a plan: on this computer's devices, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from prep.cache.ledger.ledger import is_finished
from prep.cache.remote.stored import refresh
from prep.cache.store import Cache
from prep.encode.engines.job import Job, Outcome, PictureJob
from prep.encode.options import BATCH, EncodeOptions
from prep.encode.plan import EncodePlan
from prep.encode.prepare import EncodeCall, Prepared
from prep.errors import StoppedError
from prep.formatting import counted
from prep.fs.memo import dry_run
from prep.progress import Progress
from prep.runtime import GraceOver, StopRequest, gc_enabled

AGAIN = "finished work is kept; run the same command again to continue"


@contextmanager
def heeding(options: EncodeOptions) -> Iterator[StopRequest]:
    """Heeds signals, and keeps a dry run from writing. Raises `StoppedError` for a signal while no task is under way.
    """
    stop = StopRequest(options.grace)
    try:
        with stop.heeded(), dry_run() if options.dry_run else nullcontext():
            yield stop
    except GraceOver:
        raise StoppedError(f"stopped by {stop.signal} while no task was under way", hint=AGAIN) from None


def run_tasks(ready: Prepared, planned: EncodePlan, cache: Cache, stop: StopRequest) -> Outcome:
    """Runs the tasks. Raises `StoppedError` if a signal ended the run before all were finished."""
    if not planned.tasks:
        return Outcome(encoded={}, transient=())
    job = job_of(ready, planned, cache)
    return run_job(job, stop, lambda: _run_engine(job, ready.call))


def run_job(job: PictureJob, stop: StopRequest, engine: Callable[[], Outcome]) -> Outcome:
    """Runs the tasks of a job with `engine`. Raises `StoppedError` as above."""
    outcome = Outcome(encoded={}, transient=())
    with gc_enabled(), suppress(GraceOver), stop.completing(job.claims.stop):
        outcome = engine()
    unfinished = [task for task in job.tasks if not is_finished(job.cache, task.key)] if stop.signal else []
    if unfinished:
        raise StoppedError(f"stopped by {stop.signal}: {len(job.tasks) - len(unfinished)} of "
                           f"{counted(len(job.tasks), 'task')} finished; "
                           f"{counted(sum(len(task.rows) for task in unfinished), 'row')} left to encode", hint=AGAIN)
    return outcome


def _run_engine(job: Job, call: EncodeCall) -> Outcome:
    if call.ray is not None:
        from prep.encode.engines import ray  # here: it needs an extra

        outcome = ray.run(job, call.ray, call.progress)
        refresh(job.cache)  # workers have copies of their own
        return outcome
    return run_here(job, call.progress)


def run_here(job: PictureJob, progress: Progress) -> Outcome:
    """Runs a job on this computer's devices."""
    from prep.encode.engines import devices  # here: a run with nothing to do loads no engine and no torch

    return devices.run(job, progress)


def job_of(ready: Prepared, planned: EncodePlan, cache: Cache) -> Job:
    """What an engine is told to do: the tasks of a plan, with the settings of the call."""
    call, resolved, source, options = ready.call, ready.resolved, ready.resolved.latents_from, ready.call.options
    latents = None if source is None else source.rows(resolved.specs.family, resolved.specs.dtype,
                                                      ready.frame["latents"])
    contexts = resolved.contexts.by_field()
    return Job(
        cache=cache, model=ready.resolved.model, latents=latents, vae=resolved.expected("latent", "vae"),
        text=resolved.expected("text", "text"), specs=resolved.specs, targets=resolved.targets, tasks=planned.tasks,
        text_options=resolved.text_options, text_groups=resolved.text_groups, alpha=call.recipe.image.alpha,
        vision=resolved.vision,
        compute={field: str(contexts[field].get("compute", "")) for field in ("latent", "text")},
        tile=call.recipe.model.tile, device=options.device, encoder_memory=options.encoder_memory,
        batch_size=options.batch_size or BATCH, fewer=options.batch_size is None, jobs=options.jobs,
        compiled=options.compiled,
        max_rejects=max(10, len(resolved.targets.samples) // 100) if options.max_rejects is None
        else options.max_rejects)
