"""`prep encode`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from prep.encode.report import EncodeReport


@opt.with_recipe_options()
@with_options("options", EncodeOptions)
def encode(
    source: opt.SourceArg,
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
    every: opt.Every = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Encode latents, masks and text, and write the manifest. Rows already in the cache are reused."""
    from prep.encode.plan import parse_part
    from prep.encode.prepare import EncodeCall
    from prep.encode.run import run_encode

    quiet_pillow()
    begun = time.monotonic()
    ray = _ray_options(engine, address, workers, num_gpus_per_worker, task_seconds, dry_run=options.dry_run)
    if options.measure and not options.dry_run:
        raise UsageError("--measure is given without --dry-run, expected both", hint="add --dry-run")
    recipe = opt.recipe_from_options(source, **given)
    report = run_encode(EncodeCall(
        recipe=recipe, cache=opt.cache_of(cache, recipe), output=place_of(output), options=options,
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


def _ray_options(engine: str, address: str | None, workers: int | None, gpus: float | None,
                 seconds: float | None, *, dry_run: bool) -> RayOptions | None:
    """The options of --engine ray; `None` for another engine. Raises `UsageError`."""
    from prep.encode.engines.job import RayOptions

    options = {"--address": address, "--workers": workers, "--num-gpus-per-worker": gpus, "--task-seconds": seconds}
    if not opt.is_ray(engine, options):
        return None
    first = next((name for name, value in options.items() if value is not None), None)
    if dry_run and first is not None:
        raise UsageError(f"{first} is given with --dry-run, which starts no workers", hint=f"omit {first}")
    if gpus is not None and (gpus != round(gpus, 4) if gpus < 1 else not gpus.is_integer()):  # Ray takes no others
        raise UsageError(f"--num-gpus-per-worker is {gpus:g}, expected a whole number, or a part of 1 with up to four "
                         "digits", hint="0.5 puts two workers on a GPU")
    return RayOptions(address=address or "", workers=workers, gpus=gpus,
                      seconds=RayOptions().seconds if seconds is None else seconds)
