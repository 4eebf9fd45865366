"""The `prep` commands; with cli_cache.py the only room of prep that prints or exits. Late imports keep help quick."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from prep import cli_cache
from prep.cli import init as cli_init
from prep.cli import options as opt
from prep.cli.console import progress, put, put_json, run, say
from prep.errors import EXIT_FINDINGS

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Turns pictures, captions and masks into a verified cache and one manifest.json.")


app.command()(cli_init.init)


@app.command()
def scan(
    source: opt.SourceArg,
    mask: Annotated[str | None, typer.Option(
        help="where masks are: none, sidecar, alpha, or a directory (default: sidecar, or as a recipe says)")] = None,
    model: Annotated[str | None, typer.Option(help="count captions' tokens for this pipeline directory or id")] = None,
    select: Annotated[list[str] | None, typer.Option(help="only findings of this code; may be repeated")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="no findings of this code; may be repeated")] = None,
    every: Annotated[bool, typer.Option("--all", help="every finding by name, however many there are")] = False,
    write_report: Annotated[Path | None, typer.Option(help="write one self-contained HTML page")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 for warnings, too")] = False,
    rehash: Annotated[bool, typer.Option("--rehash", help="read every file again, whatever its stamps say")] = False,
    jobs: Annotated[int, typer.Option(help="processes that decode", min=1)] = opt.JOBS,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Decode every picture, read every caption and mask, and say what is wrong with them. Exit 1 for errors."""
    from prep.report.terminal.tables import findings_table
    from prep.scan.run import Scanning, scan_all
    from prep.scan.scanner import as_json as document

    _quiet_pillow()
    report = scan_all(Scanning(
        recipe=opt.recipe_of(source, mask="sidecar" if mask is None and source.suffix != ".toml" else mask),
        jobs=jobs, model=model,
        select=select or (), ignore=ignore or (), page=write_report, rehash=rehash,
        progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet)))
    if as_json:
        put_json(document(report))
    else:
        put(findings_table(report.findings, pictures=report.pictures, usable=report.samples,
                           every=every or bool(select)))
    if report.count("error") or not report.pictures or (strict and report.count("warning")):
        raise typer.Exit(EXIT_FINDINGS)


@app.command()
def bucket(
    source: opt.SourceArg,
    batch_size: Annotated[int, typer.Option(help="samples per optimizer step, over all ranks", min=1)] = 4,
    micro_batch: Annotated[int | None, typer.Option(help="samples per forward pass (default: batch size)")] = None,
    underfill: Annotated[str, typer.Option(help="of a bucket's last micro-batch: drop, partial or repeat")] = "partial",
    world: Annotated[int, typer.Option(help="ranks that share a step", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="of the epoch whose names are listed")] = 0,
    suggest: Annotated[bool, typer.Option(
        "--suggest", help="name the buckets and the batch size that lose least, of many that are tried")] = False,
    html: Annotated[Path | None, typer.Option(help="write one page with a plot of sizes against buckets")] = None,
    png: Annotated[Path | None, typer.Option(help="write that plot as a picture")] = None,
    max_crop: Annotated[float | None, typer.Option(
        help="percent of a picture that may be cut away; more is a finding", min=0, max=100)] = None,
    max_upscale: Annotated[float | None, typer.Option(
        help="times that a picture may be enlarged; more is a finding", min=1)] = None,
    resolution: opt.Resolution = None, step: opt.Step = None, buckets: opt.Buckets = None, sizes: opt.Sizes = None,
    min_bucket: opt.MinBucket = None, upscale: opt.Upscale = None, crop: opt.Crop = None, views: opt.Views = None,
    flip: opt.Flip = None, mask: opt.Mask = None, validation: opt.Validation = None,
    jobs: opt.Jobs = opt.JOBS, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Show buckets and step plan: scale, crop loss, and by name each picture that is left out or repeated."""
    from prep.batching.plan import require_steps
    from prep.buckets import suggest as advice
    from prep.dataset import preview as outlook
    from prep.dataset.ingest import survey
    from prep.encode.plan import buckets_for, rules_of
    from prep.formatting import rejected_lines
    from prep.fs.memo import Facts
    from prep.progress import Known
    from prep.report.pages.buckets import check_bucket_files, write_bucket_files
    from prep.report.terminal.tables import outlook_tables, suggestion_table

    _quiet_pillow()
    recipe = opt.unstopped(opt.recipe_of(source, resolution=resolution, step=step, buckets=buckets, sizes=sizes,
                                         min_bucket=min_bucket, upscale=upscale, crop=crop, views=views, flip=flip,
                                         mask=mask, validation=validation))
    check_bucket_files(recipe, html, png)
    rules_of(recipe)  # what is wrong with them is said before all pictures are read
    total = Known()
    with progress("reading", total, unit="pictures", shown=not quiet) as tick:
        surveyed = survey(recipe, Facts(None), jobs=jobs, tick=tick, total=total)
    bucketing = outlook.heavy(buckets_for(recipe, surveyed), crop=max_crop, upscale=max_upscale)
    view = outlook.outlook_of(bucketing, outlook.showings_of(recipe, surveyed.items, bucketing), batch_size=batch_size,
                              micro_batch=micro_batch, seed=seed, world=world,
                              underfill=underfill)  # type: ignore[arg-type]  # checked there
    write_bucket_files(view, html, png)
    rejected = [one for one in surveyed.findings if one.severity == "error"]
    suggestions = [one.as_json() for one in advice.advise(advice.sizes_of(recipe, surveyed.items),
                                                          rules_of(recipe))] if suggest else []
    if as_json:
        more = {"suggestions": suggestions} if suggest else {}
        put_json({**outlook.as_json(view), "rejected": [one.as_json() for one in rejected], **more})
    else:
        put("\n".join([outlook_tables(view), *rejected_lines(rejected),
                       *([suggestion_table(suggestions, batch_size)] if suggest else [])]))
    require_steps(view.plan, bucketing.buckets, view.left_out)


@app.command()
def mask(
    source: opt.SourceArg,
    method: Annotated[str, typer.Option("--with", help="alpha, color, threshold, clipseg, segment or rembg")],
    output: Annotated[Path, typer.Option("-o", "--output", help="directory for the masks, apart from the pictures")],
    colour: Annotated[str, typer.Option("--color", help="background colour of --with color")] = "white",
    tolerance: Annotated[int, typer.Option(help="how far a channel may be from it, 0 to 255", min=0, max=255)] = 16,
    threshold: Annotated[float | None, typer.Option(help="part of white, 0 to 1, from which a pixel trains")] = None,
    invert: Annotated[bool, typer.Option("--invert", help="train what would not be trained")] = False,
    smooth: Annotated[float, typer.Option(help="radius of a gaussian blur before the threshold, in pixels")] = 0,
    expand: Annotated[int, typer.Option(help="pixels that what trains grows by; negative: shrinks")] = 0,
    prompt: Annotated[list[str] | None, typer.Option(help="what --with clipseg looks for; may be repeated")] = None,
    label: Annotated[list[str] | None, typer.Option(help="class of --with segment; may be repeated")] = None,
    model: Annotated[str | None, typer.Option(help="a directory or a Hub id; of rembg, a name")] = None,
    download: Annotated[bool, typer.Option("--download", help="fetch a model that is not in the cache")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")] = "auto",
    batch_size: Annotated[int, typer.Option(help="pictures per forward pass of the model", min=1)] = 4,
    own: Annotated[str, typer.Option("--mask", help="where pictures' own masks are: none, sidecar, or a directory")]
    = "sidecar",
    combine: Annotated[str | None, typer.Option(help="with the mask there is: replace, add, subtract or intersect")]
    = None,
    naming: Annotated[str, typer.Option(help="onetrainer: NAME-masklabel.png, or kohya: NAME.png")] = "onetrainer",
    force: Annotated[bool, typer.Option("--force", help="make masks anew that are there already")] = False,
    html: Annotated[Path | None, typer.Option(help="a page that shows the masks over their pictures")] = None,
    jobs: opt.Jobs = opt.JOBS, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Write mask pictures into a directory of their own, to look at, edit, and encode with --mask DIR."""
    from prep.masks.methods import MaskChoice
    from prep.masks.run import Masking, mask_all

    _quiet_pillow()
    choice = MaskChoice(method=method, colour=colour, tolerance=tolerance,  # type: ignore[arg-type]  # checked there
                        threshold=threshold, invert=invert, smooth=smooth, expand=expand, prompts=tuple(prompt or ()),
                        labels=tuple(label or ()), combine=combine,  # type: ignore[arg-type]  # as above
                        naming=naming, force=force)  # type: ignore[arg-type]  # as above
    masked = mask_all(Masking(
        recipe=opt.recipe_of(source, mask=own), choice=choice, output=output, html=html, model=model or "",
        device=device, batch_size=batch_size, jobs=jobs, download=download,
        progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet)))
    if as_json:
        put_json(masked.as_json())
    else:
        put(masked.as_text())


@app.command()
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
    max_rejects: Annotated[int | None, typer.Option(help="failed rows that stop the run (default: 10 or 1 %)")] = None,
    retry_rejects: Annotated[bool, typer.Option("--retry-rejects", help="try rows again that were rejected")] = False,
    rehash: Annotated[bool, typer.Option("--rehash", help="read every file again, whatever its stamps say")] = False,
    download: Annotated[bool, typer.Option("--download", help="fetch a Hub model that is not in the cache")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what is missing and what it will take")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Encode masks, latents and text into CACHE and write the manifest; what is there already is not computed again."""
    from prep.encode.run import Encoding, encode_all

    _quiet_pillow()
    recipe = opt.recipe_of(source, resolution=resolution, step=step, buckets=buckets, sizes=sizes,
                           min_bucket=min_bucket, upscale=upscale, crop=crop, views=views, flip=flip, alpha=alpha,
                           missing_caption=missing_caption, mask=mask, validation=validation, model=model,
                           dtype=dtype, compute=compute, prompts=prompts)
    begun = time.monotonic()
    report = encode_all(Encoding(
        recipe=recipe, cache=cache, output=output, device=device, batch_size=batch_size, jobs=jobs,
        shard_bytes=shard_mib << 20, max_rejects=max_rejects, retry_rejects=retry_rejects, rehash=rehash,
        download=download, dry_run=dry_run,
        progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet)))
    if not quiet:
        for line in report.notices:
            say(line)
    if as_json:
        put_json(report.as_json(time.monotonic() - begun))
    else:
        put(report.as_text(time.monotonic() - begun))


for looks_after_a_cache in cli_cache.COMMANDS:
    app.command()(looks_after_a_cache)


@app.command()
def demo(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new or empty directory", show_default=False)],
) -> None:
    """Write a small drawn dataset, a tiny trained model and recipes, so that everything runs with no download."""
    from prep.demo import write_demo

    write_demo(directory)
    put(f"wrote pictures, prompts and recipes to {directory}, and a tiny model to {directory / 'model'}")


def _quiet_pillow() -> None:
    from prep.images.decode import quiet

    quiet()


def main() -> NoReturn:
    """The console script `prep`."""
    run(app, "prep")
