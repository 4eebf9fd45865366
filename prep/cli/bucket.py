"""`prep bucket`."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import progress, put, put_json, say
from prep.cli.options import quiet_pillow


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
    from prep.buckets.suggest import suggest_buckets
    from prep.dataset.bucketing import buckets_for, rules_of
    from prep.dataset.ingest import ingest
    from prep.dataset.preview import flag_extremes, preview_as_json, preview_epoch, sizes_of, train_samples
    from prep.dataset.samples import notes_on_prior, roles_of, settle_masks, unread_repeats, unused_masks
    from prep.findings import rejected_lines
    from prep.fs.memo import Memo
    from prep.progress import DeferredTotal
    from prep.report.pages.buckets import check_bucket_files, write_bucket_files
    from prep.report.pages.frame import origin_of
    from prep.report.terminal.buckets import outlook_tables, suggestion_table

    quiet_pillow()
    recipe = opt.without_caption_stop(opt.recipe_from_options(
        source, resolution=resolution, step=step, buckets=buckets, sizes=sizes, min_bucket=min_bucket, upscale=upscale,
        crop=crop, views=views, flip=flip, mask=mask, validation=validation))
    check_bucket_files(recipe, html, png)
    rules_of(recipe)  # what is wrong with them is said before all pictures are read
    total = DeferredTotal()
    with progress("reading", total, unit="pictures", shown=not quiet) as tick:
        surveyed = ingest(recipe, Memo(None), jobs=jobs, tick=tick, total=total)
    recipe = settle_masks(recipe, surveyed.items)
    bucketing = flag_extremes(buckets_for(recipe, surveyed), crop=max_crop, upscale=max_upscale)
    view = preview_epoch(bucketing, train_samples(recipe, surveyed.items, bucketing), batch_size=batch_size,
                         micro_batch=micro_batch, seed=seed, world=world,
                         underfill=underfill)  # type: ignore[arg-type]  # checked there
    roles = roles_of(recipe, surveyed.items)[0]
    notes = (*unused_masks(surveyed.findings), *notes_on_prior(recipe, surveyed.items, roles, bucketing),
             *unread_repeats(recipe, surveyed.items))
    for line in () if quiet else notes:
        say(line)
    rejected = [one for one in surveyed.findings if one.severity == "error"]
    write_bucket_files(view, html, png, origin=origin_of(recipe, date.today()), rejected=rejected)
    suggestions = [one.as_json() for one in suggest_buckets(sizes_of(recipe, surveyed.items),
                                                            rules_of(recipe))] if suggest else []
    if as_json:
        more = {"suggestions": suggestions} if suggest else {}
        put_json({**preview_as_json(view), "rejected": [one.as_json() for one in rejected], **more})
    else:
        put("\n".join([outlook_tables(view), *rejected_lines(rejected),
                       *([suggestion_table(suggestions, batch_size)] if suggest else [])]))
    require_steps(view.plan, bucketing.buckets, view.left_out)
