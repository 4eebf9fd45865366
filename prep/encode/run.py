"""Runs `prep encode`, from recipe to report: checks before writing, then resolve, plan, run, assemble."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from prep.cache.ledger.ledger import load_ledger
from prep.cache.remote.opening import open_to_encode
from prep.cache.store import Cache
from prep.encode.dry_run import report_dry_run
from prep.encode.engines.job import Outcome
from prep.encode.execute import heeding, run_tasks
from prep.encode.manifest.assemble import assemble_manifest
from prep.encode.manifest.rejected import rejected_so_far
from prep.encode.manifest.replaced import Replaced
from prep.encode.plan import EncodePlan, drop_plan
from prep.encode.planned import WantedRows, clean_up, planned_rows
from prep.encode.prepare import EncodeCall, Prepared, begin, complete
from prep.encode.report import EncodeReport, part_report, report_of
from prep.encode.unchanged import note_unchanged, repeat_unchanged
from prep.errors import UsageError
from prep.fs.memo import Memo, memo_path
from prep.maintenance.recheck import recheck
from prep.models.device.named import require_device
from prep.models.vision.texts import MEMORY, embed_lacking
from prep.parse import Unparsed
from prep.progress import phase
from prep.runtime import StopRequest, gc_disabled
from prep.setting import check_values


@gc_disabled()
def run_encode(call: EncodeCall) -> EncodeReport:
    """Encodes what is missing and writes the manifest. Raises every kind of `Problem`."""
    try:
        check_values(call.options)
    except Unparsed as error:
        raise UsageError(str(error)) from None
    with heeding(call.options) as stop:
        return _encode(call, stop)


def _encode(call: EncodeCall, stop: StopRequest) -> EncodeReport:
    options = call.options
    if call.ray is None and (options.measure or not options.dry_run):  # a plan needs no such GPU
        require_device(options.device, several=True)
    if call.part is not None and (options.retry_rejects or options.recheck):
        flag = "--retry-rejects" if call.options.retry_rejects else "--recheck"
        raise UsageError(f"{flag} is given with --part {call.part}, expected one of them",
                         hint=f"run prep encode {flag} once, without --part: it changes what all parts have to do")
    begun = begin(call)
    if (unchanged := repeat_unchanged(begun)) is not None:
        begun.facts.save()
        return unchanged
    ready = complete(begun)
    if call.options.dry_run:
        return replace(report_dry_run(ready), truncated=ready.truncated)
    if call.check is not None:
        ready = call.check(ready)
    cache = open_to_encode(call.cache, create=True)
    begun.facts.save()
    if call.options.recheck:
        recheck(cache, ready.resolved.targets.keys(), jobs=call.options.jobs, progress=call.progress)
    if call.part is None:
        clean_up(cache)
    wanted = WantedRows(ready.resolved, call.options, call.progress, call.part)
    with planned_rows(wanted, cache) as planned:
        outcome = run_tasks(ready, planned, cache, stop)
        if call.part is None and call.ray is None:
            outcome = replace(outcome, notices=(*outcome.notices, *_embed_captions(ready)))
        report = (write_manifest(ready, cache, planned, outcome) if call.part is None else
                  part_report(call.output, ready.resolved, planned, outcome, call.part,
                              rejected_so_far(ready.resolved, load_ledger(cache))))
    begun.facts.save()
    return replace(report, truncated=ready.truncated)


def _embed_captions(ready: Prepared) -> tuple[str, ...]:
    """Embeds captions, if their pictures are; what is to be said of that. Before the manifest is written: a run that is
    interrupted here is planned again."""
    vision = ready.resolved.vision
    if vision is None or vision.reading is None:
        return ()
    captions = (text.caption for sample in ready.resolved.targets.samples for text in sample.texts if text.weight)
    with closing(Memo(memo_path(*MEMORY))) as memory:
        done = embed_lacking(vision, captions, memory, device=ready.call.options.device, progress=ready.call.progress)
    return (f"note: {done.note}",) if done.note else ()


def write_manifest(ready: Prepared, cache: Cache, planned: EncodePlan, outcome: Outcome) -> EncodeReport:
    """Writes the manifest, removes the plan, and reports, while gc can remove no table.

    Raises `CacheError`, `EmptyPlanError`.
    """
    with phase(ready.call.progress, "writing the manifest"):
        begun = ready.begun
        sealed = assemble_manifest(ready.resolved, cache, begun.output, frame=ready.frame,
                                   prompt_bytes=begun.prompt_bytes, facts=begun.facts, transient=outcome.transient,
                                   replaces=begun.replaces, unchanged=None if planned.tasks else planned)
        drop_plan(cache, planned, begun.output)
        report = report_of(ready.call.output, ready.resolved, planned, outcome, sealed, masks_asked=ready.masks_asked,
                           replaced=Replaced.of(begun.replaces, sealed))
        note_unchanged(ready, planned, report, sealed)
    return report
