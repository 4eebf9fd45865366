"""`prep encode`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import progress, put, put_json, say
from prep.cli.options import quiet_pillow
from prep.errors import EXIT_FINDINGS


def encode(
    source: opt.SourceArg,
    cache: Annotated[Path, typer.Option(help="the cache directory; made when it is not there", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="the manifest to write")] = Path("manifest.json"),
    model: Annotated[str | None, typer.Option(help="a diffusers pipeline directory, or a Hub id")] = None,
    resolution: opt.Resolution = None, step: opt.Step = None, buckets: opt.Buckets = None, sizes: opt.Sizes = None,
    min_bucket: opt.MinBucket = None, upscale: opt.Upscale = None, crop: opt.Crop = None, views: opt.Views = None,
    flip: opt.Flip = None, alpha: opt.Alpha = None, mask: opt.Mask = None,
    missing_caption: opt.MissingCaption = None, validation: opt.Validation = None,
    prompts: Annotated[Path | None, typer.Option(help="file of sample prompts: prompt --n negative")] = None,
    dtype: Annotated[str | None, typer.Option(help="of the stored rows: bfloat16, float16 or float32")] = None,
    compute: Annotated[str | None, typer.Option(help="dtype of the encoders (default: that of the rows)")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")] = "auto",
    batch_size: Annotated[int, typer.Option(help="pictures per forward pass of the VAE", min=1)] = 4,
    jobs: opt.Jobs = opt.JOBS,
    shard_mib: Annotated[int, typer.Option(help="size of a shard in MiB, at most", min=1, max=4096)] = 256,
    max_rejects: Annotated[int | None, typer.Option(
        help="stop after more failed rows: latents that are not finite, files that changed meanwhile; bad pictures do "
        "not count (default: 1 % of the samples, at least 10)")] = None,
    retry_rejects: Annotated[bool, typer.Option("--retry-rejects", help="try rows again that were rejected")] = False,
    rehash: Annotated[bool, typer.Option("--rehash", help="read every file again, whatever its stamps say")] = False,
    recheck: Annotated[bool, typer.Option("--recheck", help="verify every byte that is reused, and encode damaged rows "
                                          "again")] = False,
    download: Annotated[bool, typer.Option("--download", help="fetch a Hub model that is not in the cache")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 when pictures are left out")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what is missing and what it will take")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Encode masks, latents and text into CACHE and write the manifest; what is there already is not computed again."""
    from prep.encode.run import EncodeCall, run_encode

    quiet_pillow()
    recipe = opt.recipe_from_options(
        source, resolution=resolution, step=step, buckets=buckets, sizes=sizes, min_bucket=min_bucket, upscale=upscale,
        crop=crop, views=views, flip=flip, alpha=alpha, missing_caption=missing_caption, mask=mask,
        validation=validation, model=model, dtype=dtype, compute=compute, prompts=prompts)
    begun = time.monotonic()
    report = run_encode(EncodeCall(
        recipe=recipe, cache=cache, output=output, device=device, batch_size=batch_size, jobs=jobs,
        shard_bytes=shard_mib << 20, max_rejects=max_rejects, retry_rejects=retry_rejects, rehash=rehash,
        recheck=recheck, download=download, dry_run=dry_run,
        progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet)))
    if not quiet:
        for line in report.notices:
            say(line)
    if as_json:
        put_json(report.as_json(time.monotonic() - begun))
    else:
        put(report.as_text(time.monotonic() - begun))
    if strict and report.rejected:
        raise typer.Exit(EXIT_FINDINGS)
