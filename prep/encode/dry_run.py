"""Says what an encode would do, and estimates what it takes; writes nothing."""

from __future__ import annotations

from prep.cache.remote.opening import is_cache, open_to_encode
from prep.cache.store import Cache
from prep.encode.execute import job_of
from prep.encode.forecast.estimate import estimate
from prep.encode.manifest.rejected import rejected_so_far
from prep.encode.plan import plan
from prep.encode.prepare import Prepared
from prep.encode.report import EncodeReport, errors_of
from prep.fs.remote.copies import directory_of
from prep.maintenance.recheck import recheck
from prep.progress import phase
from prep.runtime import defer_interrupts, gc_enabled


def report_dry_run(ready: Prepared) -> EncodeReport:
    """The report of an encode that was only planned; with `measure`, a few rows are encoded in memory.

    Raises as `run_encode` does.
    """
    call, resolved = ready.call, ready.resolved
    cache = open_to_encode(call.cache, create=False) if is_cache(call.cache) else None
    if call.options.recheck and cache is not None:
        recheck(cache, resolved.targets.keys(), jobs=call.options.jobs, progress=call.progress)
    planned = plan(resolved, cache, shard_bytes=call.options.shard_bytes, retry=call.options.retry_rejects, store=False,
                   part=call.part)
    measured = None
    if call.options.measure and planned.tasks:
        from prep.encode.engines.measure import measure  # here: it imports torch

        with gc_enabled():
            measured = measure(job_of(ready, planned, cache or Cache(root=directory_of(call.cache))), call.progress)
    memory = None
    if planned.tasks:
        with defer_interrupts():
            from prep.encode.forecast.memory import forecast_of  # here: it imports torch and libraries

        with phase(call.progress, "estimating memory"), gc_enabled():
            memory = forecast_of(ready, planned)
    rejected = () if call.options.retry_rejects else rejected_so_far(resolved, planned.ledger)
    return EncodeReport(estimate=estimate(resolved, planned, cache, measured, memory), manifest=call.output,
                        encoded=planned.missing, reused=planned.reused, bytes=planned.bytes,
                        rejected=(*errors_of(resolved.targets.findings), *rejected), notices=resolved.targets.notices,
                        samples={}, dry_run=True, part=call.part)
