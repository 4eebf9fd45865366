"""`prep encode`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say, screen_width
from prep.cli.options import quiet_pillow
from prep.cli.ticker import progress
from prep.errors import EXIT_FINDINGS, UsageError


@opt.with_recipe_options()
def encode(
    source: opt.SourceArg,
    cache: Annotated[Path, typer.Option(help="the cache directory; created if missing", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="the manifest to write")] = Path("manifest.json"),
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    device: opt.Devices = "auto",
    batch_size: Annotated[int, typer.Option(help="pictures per forward pass of the VAE", min=1)] = 4,
    jobs: opt.Jobs = opt.JOBS,
    encoder_memory: Annotated[float | None, typer.Option(
        help="GiB of the device for the weights of a text encoder; a larger one stays in the computer's memory, and "
        "its layers are copied one by one (default: no limit)", min=0)] = None,
    compiled: Annotated[bool, typer.Option(
        "--compile", help="compile VAE and text encoders with torch.compile: the first batches take minutes, the "
        "others less; for many pictures")] = False,
    shard_mib: Annotated[int, typer.Option(help="maximum size of a shard in MiB", min=1, max=4096)] = 256,
    max_rejects: Annotated[int | None, typer.Option(
        help="stop after more than this many failed rows: latents that are not finite, files that changed meanwhile, "
        "decoders that crashed; bad pictures do not count (default: 1 % of the samples, at least 10)")] = None,
    retry_rejects: Annotated[bool, typer.Option("--retry-rejects", help="retry rows that earlier runs rejected"
                                                )] = False,
    rehash: Annotated[bool, typer.Option("--rehash", help="re-read every file, ignoring stamps")] = False,
    recheck: Annotated[bool, typer.Option("--recheck", help="verify every byte that is reused, and encode damaged rows "
                                          "again")] = False,
    download: opt.Download = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 if pictures are skipped")] = False,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="show which rows are missing, their size and the weights of the encoders; write nothing"
        )] = False,
    measure: Annotated[bool, typer.Option(
        "--measure", help="with --dry-run: encode a few rows, and estimate time and peak memory of the run")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Encode latents, masks and text, and write the manifest. Rows already in the cache are reused."""
    from prep.encode.run import EncodeCall, run_encode

    quiet_pillow()
    if measure and not dry_run:
        raise UsageError("--measure is given without --dry-run, expected both", hint="add --dry-run")
    recipe = opt.recipe_from_options(source, **given)
    begun = time.monotonic()
    report = run_encode(EncodeCall(
        recipe=recipe, cache=cache, output=output, device=device, batch_size=batch_size, jobs=jobs,
        shard_bytes=shard_mib << 20, max_rejects=max_rejects, retry_rejects=retry_rejects, rehash=rehash,
        recheck=recheck, download=download, dry_run=dry_run, measure=measure, compiled=compiled,
        encoder_memory=None if encoder_memory is None else int(encoder_memory * 2**30),
        progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet)))
    if not quiet:
        for line in report.notices:
            say(line)
    if as_json:
        put_json(report.as_json(time.monotonic() - begun))
    else:
        put(report.as_text(time.monotonic() - begun, every=screen_width() is None))
    if strict and report.rejected:
        raise typer.Exit(EXIT_FINDINGS)
