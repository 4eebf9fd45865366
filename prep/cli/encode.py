"""`prep encode`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say
from prep.cli.options import quiet_pillow
from prep.cli.signature import choice, with_options
from prep.cli.ticker import progress_unless
from prep.encode.options import MOST_SECONDS, EncodeOptions
from prep.errors import EXIT_FINDINGS, UsageError
from prep.fs.place import place_of

if TYPE_CHECKING:
    from prep.encode.engines.job import RayOptions
    from prep.encode.forecast.simulate import Scale
    from prep.encode.report import EncodeReport


@opt.with_recipe_options()
@with_options("options", EncodeOptions)
def encode(
    source: opt.SourceOrNone = None,
    cache: opt.CacheOrNone = None,
    output: opt.Output = Path("manifest.json"),
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    options: EncodeOptions = EncodeOptions(),  # noqa: B008  # replaced by the options
    part: Annotated[str | None, typer.Option(
        metavar="I/N", help="encode only share I of N, from 0 to N-1, and write no manifest: prep seal does that when "
        "all shares are encoded, each by a job with the same options", show_default=False)] = None,
    engine: Annotated[str, choice(help="what encodes: this machine, or a Ray cluster", words=opt.ENGINES)] = "local",
    address: opt.Address = None,
    workers: Annotated[int | None, typer.Option(
        help="with --engine ray: processes that encode (default: one per GPU, or per node)", min=1,
        show_default=False)] = None,
    num_gpus_per_worker: Annotated[float | None, typer.Option(
        help="with --engine ray: GPUs of each worker (default: 1 if the cluster has any)", min=0,
        show_default=False)] = None,
    task_seconds: Annotated[float | None, typer.Option(
        help="with --engine ray: seconds that a task may take before its worker is replaced (default: 3600)", min=1,
        max=MOST_SECONDS, show_default=False)] = None,
    strict: opt.Strict = False,
    simulated: Annotated[bool, typer.Option(
        "--simulate", help="with --pictures: show what that many pictures would take, like these, or without SOURCE "
        "like those assumed of a model family; write nothing")] = False,
    pictures: Annotated[float | None, typer.Option(
        help="with --simulate: how many pictures, like 1e9", min=1, max=opt.MOST_SAMPLES, show_default=False)] = None,
    gpus: Annotated[int | None, typer.Option(
        help="with --simulate: devices like this one that encode (default: 1)", min=1, show_default=False)] = None,
    pictures_per_second: Annotated[float | None, typer.Option(
        help="with --simulate: how many a device encodes, instead of --measure", min=1e-6, max=1e6, show_default=False,
        )] = None,
    store_latency: Annotated[str | None, typer.Option(
        metavar="TIME", help="with --simulate: the time in which an object store answers a request, like 30ms or 0.1s, "
        "for a cache in one", show_default=False)] = None,
    family: opt.Family = None,
    every: opt.Every = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Encode latents, masks and text, and write the manifest. Rows already in the cache are reused."""
    from prep.encode.plan import parse_part
    from prep.encode.run import EncodeCall, run_encode

    quiet_pillow()
    begun = time.monotonic()
    scale = _scale(simulated, pictures, gpus, store_latency, pictures_per_second, part, options.measure)
    ray = _ray_options(engine, address, workers, num_gpus_per_worker, task_seconds,
                       unused="--simulate" if simulated else "--dry-run" if options.dry_run else "")
    if source is None and scale is not None:
        _refuse_without_source({"--cache": cache, "--edits": given.get("edits"), "--prompts": given.get("prompts"),
                                "--measure": options.measure, "--recheck": options.recheck,
                                "--retry-rejects": options.retry_rejects, "--rehash": options.rehash,
                                "--strict": strict})
        _tell_assumed(family, given, scale, options.shard_bytes, output, begun, as_json=as_json)
        return
    source = _source(source, family)
    options = replace(options, dry_run=options.dry_run or simulated)
    if options.measure and not options.dry_run:
        raise UsageError("--measure is given without --dry-run, expected both", hint="add --dry-run")
    recipe = opt.recipe_from_options(source, **given)
    report = run_encode(EncodeCall(
        recipe=recipe, cache=opt.cache_of(cache, recipe), output=place_of(output), options=options, scale=scale,
        part=None if part is None else parse_part(part), ray=ray, progress=progress_unless(quiet)))
    tell(report, time.monotonic() - begun, every=every, as_json=as_json, quiet=quiet)
    if report.unmade or (strict and report.rejected):
        raise typer.Exit(EXIT_FINDINGS)


def tell(report: EncodeReport, seconds: float, *, every: bool, as_json: bool, quiet: bool) -> None:
    """Writes a report of encoding to stdout, and its notices to stderr unless `quiet`."""
    if not quiet:
        for line in report.notices:
            say(line)
    if as_json:
        put_json(report.as_json(seconds))
    else:
        put(report.as_text(seconds, every=every))


def _source(source: Path | None, family: str | None) -> Path:
    """SOURCE. Raises `UsageError` if it is not given, or what it leaves nothing to do."""
    command = "prep encode SOURCE --model MODEL --cache CACHE"
    if source is None:
        raise UsageError("no SOURCE is given, expected the pictures to encode", hint=f"{command}; to plan without "
                         "pictures: prep encode --simulate --pictures 1e9")
    if family is not None:
        raise UsageError("--family is given with SOURCE, expected one of them", hint="omit --family: --model says it, "
                         "or family in [model] of a recipe")
    return source


def _refuse_without_source(given: Mapping[str, object]) -> None:
    """Raises `UsageError` for an option that is about the pictures of a source, or about a cache."""
    first = next((name for name, value in given.items() if value), None)
    if first is not None:
        raise UsageError(f"{first} is given without SOURCE, expected both", hint=f"name a SOURCE, or omit {first} to "
                         "plan for pictures that are not there yet")


def _tell_assumed(family: str | None, given: Mapping[str, Any], scale: Scale, shard_bytes: int, output: Path,
                  begun: float, *, as_json: bool) -> None:
    """Plans for pictures that are assumed, and writes what they would take to stdout."""
    from prep.encode.forecast.simulate import simulate_assumed
    from prep.encode.report import assumed_report
    from prep.recipe.options import choices_of

    choices = choices_of(given)
    told = simulate_assumed(family, choices.pop("model.path") or "", scale, shard_bytes, choices)
    if as_json:
        put_json(assumed_report(told, output).as_json(time.monotonic() - begun))
    else:
        put("\n".join(told.as_lines()))


def _scale(simulated: bool, pictures: float | None, gpus: int | None, latency: str | None, rate: float | None,
           part: str | None, measure: bool) -> Scale | None:
    """What to simulate; `None` if that was not asked. Raises `UsageError`."""
    from prep.encode.forecast.simulate import Scale

    given = {"--pictures": pictures, "--gpus": gpus, "--store-latency": latency, "--pictures-per-second": rate}
    first = next((name for name, value in given.items() if value is not None), None)
    if not simulated:
        if first is not None:
            raise UsageError(f"{first} is given without --simulate, expected both", hint="add --simulate")
        return None
    if pictures is None:
        raise UsageError("--simulate is given without --pictures, expected both", hint="add --pictures 1e9")
    if part is not None:
        raise UsageError("--part is given with --simulate, which shows what all parts take", hint="omit --part; --gpus "
                         "says how many devices share the work")
    if rate is not None and measure:
        raise UsageError("--pictures-per-second is given with --measure, expected one of them",
                         hint="--measure finds out how many this device encodes")
    return Scale(pictures=int(pictures), gpus=gpus or 1, latency=None if latency is None else opt.latency_of(latency),
                 rate=rate)


def _ray_options(engine: str, address: str | None, workers: int | None, gpus: float | None,
                 seconds: float | None, *, unused: str) -> RayOptions | None:
    """The options of --engine ray; `None` for another engine. `unused`: the option for which nothing is started, or "".

    Raises `UsageError`.
    """
    from prep.encode.engines.job import RayOptions

    given = {"--address": address, "--workers": workers, "--num-gpus-per-worker": gpus, "--task-seconds": seconds}
    if not opt.is_ray(engine, given):
        return None
    first = next((name for name, value in given.items() if value is not None), None)
    if unused and first is not None:
        raise UsageError(f"{first} is given with {unused}, which starts no workers", hint=f"omit {first}")
    if gpus is not None and (gpus != round(gpus, 4) if gpus < 1 else not gpus.is_integer()):  # Ray takes no others
        raise UsageError(f"--num-gpus-per-worker is {gpus:g}, expected a whole number, or a part of 1 with up to four "
                         "digits", hint="0.5 puts two workers on a GPU")
    return RayOptions(address=address or "", workers=workers, gpus=gpus,
                      seconds=RayOptions().seconds if seconds is None else seconds)
