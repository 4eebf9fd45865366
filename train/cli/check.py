"""`train check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.console import put, put_json
from prep.cli.ticker import progress_unless
from prep.errors import UsageError
from prep.formatting import counted, format_bytes, printable
from prep.fs.place import Place, maybe_place
from train.cli import options as opt
from train.cli import resumed as resuming
from train.cli.cluster import MOST_SAMPLES, Cluster, latency_of
from train.cli.find_lr import FindLr, document, finding, lines_of
from train.cli.memory import Fitting, MemoryOpt, fitting
from train.cli.resumed import Resumed
from train.cli.run import manifest_of, no_manifest, run_place, start_of
from train.cli.summary import outlook_lines, plan_lines, step_sizes
from train.parallel.ranks import ALONE

if TYPE_CHECKING:
    from prep.errors import Problem
    from prep.training.schema import Config
    from train.cluster_forecast import Outlook
    from train.rates.find import Found
    from train.setup import CheckReport, RunRequest, Setup


@opt.with_setting_options
def check(
    manifest: opt.ManifestOrRuns = None, cache: opt.MovedCache = None, config: opt.ConfigOpt = None,
    model: opt.ModelOpt = None, output: opt.Output = None,
    resume: opt.Resume = False, start_from: opt.From = None, adopt: opt.Adopt = False,
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    settings: opt.Set = None, init_from: opt.Init = None,
    allow_other_encoders: opt.Others = False,
    world_size: Annotated[int | None, typer.Option(help="show what each node reads in an epoch, with so many ranks in "
                                                   "all", min=1)] = None,
    nodes: Annotated[int | None, typer.Option(
        help="with --world-size: computers, with as many ranks each (default: 1)", min=1, show_default=False)] = None,
    node_cache: Annotated[str | None, typer.Option(
        metavar="SIZE", help="with --world-size: what a node downloads if copies of shards may take so much, like 2TB",
        show_default=False)] = None,
    samples: Annotated[float | None, typer.Option(
        help="with --world-size: the same for a larger data set like this one, of so many samples: 1e9", min=1,
        max=MOST_SAMPLES, show_default=False)] = None,
    store_latency: Annotated[str | None, typer.Option(
        metavar="TIME", help="with --samples or --node-cache: the time in which an object store answers a "
        "request, like 30ms", show_default=False)] = None,
    memory: MemoryOpt = None, find_lr: FindLr = False,
    download: opt.Download = False, device: opt.Device = "auto", as_json: opt.AsJson = False,
) -> None:
    """Check everything that run checks, show the step plan, and estimate the memory that a step takes. No weights are
    loaded without --find-lr.

    With --resume: what run --resume would refuse, from which step it would continue, and what differs.
    """
    from prep.errors import CacheError, PathError
    from train.check.requirements import check_testable

    config = config if resume else opt.settings_of(config, manifest)
    latency = None if store_latency is None else latency_of(store_latency)
    cluster = Cluster(world=world_size, nodes=nodes or 1)
    _require_new(find_lr, resume, cluster)
    place = run_place(manifest, output, resume, "train check")
    try:
        resumed = _resumed(place, resume, start_from, adopt, init_from)
        data = maybe_place(manifest) or _manifest_of(resumed)
    except (PathError, CacheError) as problem:
        _tell_none(problem, as_json)
        return
    chosen = opt.read_settings(config, settings, given,
                               None if resumed is None or resumed.start is None else resumed.start.state.config)
    if find_lr:
        check_testable(chosen)
    resumed, report = _report(resumed, opt.request_of(data, model, download, allow_other_encoders, init_from,
                                                      cache),
                              chosen)
    report = _completed(report, chosen, resumed, cluster, _check_device(device, chosen), place,
                        named=output is not None)
    report, fit = _fitted(report, device, memory, cluster.world)
    outlook = _outlook(report.setup, cluster, node_cache, samples)
    if latency is not None and outlook is None and report.setup is not None:
        raise UsageError("--store-latency is given without --node-cache and --samples, expected one of them",
                         hint="add --node-cache, the space for copies of shards on a node")
    found = finding(report.setup, device, place) if find_lr and report.setup is not None else None
    _show(report, resumed, _reads(report.setup, cluster), outlook, latency, world_size, fit, found, as_json=as_json)
    opt.stop_at_faults(report.faults, printed=as_json)


def _require_new(find_lr: bool, resume: bool, cluster: Cluster) -> None:
    """Raises `UsageError` if a rate is to be found for a run that is continued, or of several processes."""
    if find_lr and (resume or cluster.world is not None):
        other = "--resume" if resume else "--world-size"
        raise UsageError(f"--find-lr is given with {other}, but it tests the first steps of one process",
                         hint="omit one of them")


def _resumed(place: Place, resume: bool, named: str | None, adopt: bool, init: Path | None) -> Resumed | None:
    """The run to be continued, if --resume is given. Raises `PathError`, `CacheError`, `UsageError`."""
    from train.runs.stored.stored import kept_in

    if resume:
        return resuming.find(place, named, adopt, init)
    start_of(kept_in(place).run, False, named, adopt, init, ALONE)  # refuses what goes with --resume only
    return None


def _report(resumed: Resumed | None, request: RunRequest, config: Config) -> tuple[Resumed | None, CheckReport]:
    """The report on a new run, or on one that is to be continued."""
    from train.check import check

    if resumed is None:
        return None, check(request, config, progress=progress_unless(False))
    return resuming.check(resumed, request, config, progress_unless(False))


def _show(report: CheckReport, resumed: Resumed | None, reads: Mapping[str, Any], outlook: Outlook | None,
          latency: float | None, world: int | None, fit: Fitting, found: Found | None, *, as_json: bool) -> None:
    """Prints what was found, but for the faults, which the command ends with."""
    if as_json:
        put_json(_as_json(report, fit) | ({"resume": resuming.as_json(resumed)} if resumed else {})
                 | ({"nodes": reads} if reads else {}) | ({"outlook": asdict(outlook)} if outlook else {})
                 | ({"find_lr": document(found)} if found else {}))
        return
    lines = [*([resuming.line(resumed, report.setup)] if resumed else []), _as_text(report, world, fit),
             _reads_line(reads), *(outlook_lines(outlook, latency) if outlook else []),
             *(lines_of(found) if found else [])]
    if text := "\n".join(line for line in lines if line):
        put(text)


def _completed(report: CheckReport, chosen: Config, resumed: Resumed | None, cluster: Cluster,
               device: tuple[str | None, list[Problem]], place: Place, *, named: bool) -> CheckReport:
    """The report with what it lacks on the run's place, on its device and on the ranks and nodes. `device`: the kind of
    device, and what is wrong with it."""
    from train.check.nodes import notes_on_nodes
    from train.check.shares import notes_on_shares
    from train.config.unused import unused_on

    kind, unfit = device
    noted = () if named or resumed else _usual_place(report.setup, place)
    report = replace(report, notes=(*report.notes, *unused_on(chosen, kind, cluster.world), *noted))
    begun = [] if resumed else [*_check_place(report.setup, place if named else None, place),
                                *opt.prompt_faults(report.setup)]
    if more := begun + unfit + _check_ranks(chosen, cluster.world):
        report = replace(report, faults=(*report.faults, *more), setup=None)
    if report.setup is None:
        return report
    return replace(report, notes=(*report.notes, *notes_on_nodes(report.setup, cluster.nodes, begins=resumed is None),
                                  *notes_on_shares(report.setup)))


def _fitted(report: CheckReport, device: str, memory: str | None, world: int | None) -> tuple[CheckReport, Fitting]:
    """The memory of the run, and the report with a fault if it surely does not fit. Raises `UsageError`."""
    fit = fitting(report.setup, device, opt.bytes_named(memory, "--memory"), world)
    if fit.fault is not None:
        report = replace(report, faults=(*report.faults, fit.fault), setup=None)
    return report, fit


def _tell_none(problem: Problem, as_json: bool) -> None:
    """Ends the command if there is nothing to resume."""
    from train.setup import CheckReport

    if as_json:
        put_json(_as_json(CheckReport(faults=(problem,), setup=None, plan=None, left_out=(), repeated=()),
                          Fitting(forecast=None)))
    opt.stop_at_faults([problem], printed=as_json)


def _manifest_of(resumed: Resumed | None) -> Place:
    """The manifest of the run that is to be continued. Raises `UsageError` if it has none yet, and as `manifest_of`."""
    if resumed is None or resumed.start is None:
        raise no_manifest()
    return manifest_of(resumed.start.run)


def _reads(setup: Setup | None, cluster: Cluster) -> dict[str, Any]:
    """The bytes that each of several nodes reads in the first epoch; empty if that was not asked, or there are faults.

    Raises `UsageError` for numbers that do not fit.
    """
    cluster.require_multiple()
    if setup is None or cluster.world is None:
        return {}
    from prep.loader.prefetch import bytes_by_node

    sizes = bytes_by_node(setup.index, setup.plan, world=cluster.world, nodes=cluster.nodes, masked=setup.reads_masks)
    return {"nodes": cluster.nodes, "ranks": cluster.world, "bytes": sizes,
            "of": sum(shard.bytes for shard in setup.index.shards)}


def _outlook(setup: Setup | None, cluster: Cluster, room: str | None, samples: float | None) -> Outlook | None:
    """What nodes of such a size, or for such a data set, would download; `None` if that was not asked.

    Raises `UsageError`.
    """
    from train.cluster_forecast import outlook_of

    if room is None and samples is None:
        return None
    world, most = cluster.require_world(), opt.bytes_named(room, "--node-cache")
    return None if setup is None else outlook_of(
        setup.index, setup.plan, world=world, nodes=cluster.nodes, room=most, masked=setup.reads_masks,
        samples=None if samples is None else int(samples))


def _reads_line(reads: Mapping[str, Any]) -> str:
    """What each node reads, as a line; empty if that was not asked."""
    if not reads:
        return ""
    least, most = format_bytes(min(reads["bytes"])), format_bytes(max(reads["bytes"]))
    each = least if least == most else f"{least} to {most}"
    return (f"{counted(reads['nodes'], 'node')} of {counted(reads['ranks'] // reads['nodes'], 'rank')}: each reads "
            f"{each} of the shards' {format_bytes(reads['of'])} in an epoch")


def _check_ranks(chosen: Config, world: int | None) -> list[Problem]:
    """The fault of settings that so many ranks cannot have."""
    from train.check.requirements import too_many_ranks

    fault = too_many_ranks(chosen, world or 1)
    return [] if fault is None else [fault]


def _check_place(setup: Setup | None, named: Place | None, usual: Place) -> list[Problem]:
    """The fault of the run's directory, if it has one; without -o only that of its disk."""
    from prep.errors import Problem
    from train.runs.stored.stored import kept_in

    try:
        if setup is not None:
            storage = kept_in(named or usual)
            if named is not None:
                storage.check_new(setup)
            storage.check_space(setup)
    except Problem as problem:
        return [problem]
    return []


def _usual_place(setup: Setup | None, usual: Place) -> Iterator[str]:
    """A note if a run cannot begin in the directory `usual`, which nobody asked for, so that it is no fault."""
    from prep.errors import Problem
    from train.runs.stored.stored import kept_in

    try:
        if setup is not None:
            kept_in(usual).check_new(setup)
    except Problem as problem:
        yield f"train run without -o would stop: {problem.message}; {problem.hint}"


def _check_device(name: str, config: Config) -> tuple[str | None, list[Problem]]:
    """The kind of device, None for "auto" where nothing depends on it; and its fault if there is none or settings need
    another. Where nothing does, neither "auto" nor "cpu" is looked up, since that imports torch: a check that finds
    faults in the data, and so estimates no memory, does without.
    """
    from prep.errors import Problem
    from train.check.requirements import check_device, needs_device
    from train.config.unused import depends_on_device

    if name in ("auto", "cpu") and not needs_device(config) and not depends_on_device(config):
        return None, []
    if name == "cpu" and not needs_device(config):
        return name, []
    from prep.models.tensors import pick_device

    try:
        kind = pick_device(name).type
        check_device(config, kind)
        opt.check_compiler(config, kind)
    except Problem as problem:
        return None, [problem]
    return kind, []


def _as_json(report: CheckReport, fit: Fitting) -> dict[str, Any]:
    from train.check.shares import shares_of

    return {"format": "latentry/check", "version": 1, "ok": not report.faults,
            "faults": [{"what": fault.message, "hint": fault.hint} for fault in report.faults],
            "steps_per_epoch": report.plan.steps_per_epoch if report.plan else 0,
            "step_sizes": {str(size): steps for size, steps in step_sizes(report.plan).items()} if report.plan else {},
            "masked": report.setup.masked if report.setup else None,
            "shares": asdict(shares_of(report.setup)) if report.setup else None, "memory": fit.document,
            "left_out": list(report.left_out), "repeated": list(report.repeated), "notes": list(report.notes)}


def _as_text(report: CheckReport, world: int | None, fit: Fitting) -> str:
    lines = [*plan_lines(report, world or 1), *fit.lines]
    lines += [f"note: {printable(note)}" for note in report.notes]
    lines += [f"dropped: {printable(name)}" for name in report.left_out]
    lines += [f"repeated: {printable(name)}" for name in report.repeated]
    return "\n".join(lines)
