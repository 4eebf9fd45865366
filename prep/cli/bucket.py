"""`prep bucket`."""

from __future__ import annotations

from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say, screen_width
from prep.cli.options import quiet_pillow
from prep.cli.signature import option_of
from prep.cli.ticker import progress_unless
from prep.recipe.options import without_caption_stop
from prep.runtime import gc_disabled
from prep.training.table import SETTINGS


@opt.with_recipe_options(without=("model", "dtype", "compute", "max_length", "clip_skip", "text_windows",
                                  "text_quantization", "posterior", "tile", "alpha", "missing_caption", "embed",
                                  "prompts"))
@gc_disabled()  # hundreds of thousands of records live to the end, in no cycle: the collector took half of the time
def bucket(
    source: opt.SourceArg,
    batch_size: Annotated[int, option_of(SETTINGS["batch_size"], "--batch-size", help="samples per optimizer step, "
                                         "over all ranks")] = 4,
    micro_batch: Annotated[int | None, option_of(SETTINGS["micro_batch"], "--micro-batch")] = None,
    underfill: opt.Underfill = "partial",
    world: Annotated[int, typer.Option("--world", "--world-size", help="number of ranks that share a step",
                                       min=1)] = 1,
    seed: Annotated[int, option_of(SETTINGS["seed"], "--seed", help="seed of the epoch whose left-out names are listed"
                                   )] = 0,
    suggest: Annotated[bool, typer.Option(
        "--suggest", help="suggest the buckets and the batch size that lose the least, of many tried")] = False,
    html: Annotated[Path | None, typer.Option(help="write an HTML page with a plot of sizes against buckets")] = None,
    png: Annotated[Path | None, typer.Option(help="write that plot as a picture")] = None,
    max_crop: Annotated[float | None, typer.Option(
        help="warn about pictures cropped by more than this percentage", min=0, max=100)] = None,
    max_upscale: Annotated[float | None, typer.Option(
        help="warn about pictures enlarged more than this many times", min=1)] = None,
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    every: opt.Every = False,
    jobs: opt.Jobs = opt.JOBS, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Preview buckets and steps. Shows scale, crop loss, and the names of pictures dropped or repeated."""
    from prep.batching.plan import require_steps
    from prep.buckets.suggest import suggest_buckets
    from prep.dataset.bucketing import buckets_for, rules_of
    from prep.dataset.facts import open_facts
    from prep.dataset.ingest import ingest
    from prep.dataset.preview import flag_extremes, preview_as_json, preview_epoch, sizes_of, train_samples
    from prep.dataset.samples import dataset_notes, settle_masks
    from prep.findings import rejected_lines
    from prep.pages.snapshot import origin_of
    from prep.progress import DeferredTotal, phase
    from prep.report.snapshots.buckets import check_bucket_files, write_bucket_files
    from prep.report.terminal.buckets import outlook_tables, suggestion_table

    quiet_pillow()
    recipe = without_caption_stop(opt.recipe_from_options(source, **given))
    check_bucket_files(recipe, html, png)
    rules_of(recipe)  # reports wrong rules before reading all pictures
    progress = progress_unless(quiet)
    with progress("reading", total := DeferredTotal(), "pictures") as tick, closing(open_facts()) as facts:
        surveyed = ingest(recipe, facts, jobs=jobs, tick=tick, total=total)
    with phase(progress, "planning"):
        recipe = settle_masks(recipe, surveyed.items)
        bucketing = flag_extremes(buckets_for(recipe, surveyed), crop=max_crop, upscale=max_upscale)
        view = preview_epoch(bucketing, train_samples(recipe, surveyed.items, bucketing), batch_size=batch_size,
                             underfill=underfill,  # type: ignore[arg-type]  # checked there
                             micro_batch=micro_batch, seed=seed, world=world)
    for line in () if quiet else dataset_notes(recipe, surveyed, bucketing):
        say(line)
    rejected = [finding for finding in surveyed.findings if finding.severity == "error"]
    write_bucket_files(view, html, png, origin=origin_of(recipe, date.today()), rejected=rejected)
    sizes = sizes_of(recipe, surveyed.items) if suggest else {}
    suggestions = [row.as_json() for row in suggest_buckets(sizes, rules_of(recipe))] if suggest else []
    if as_json:
        put_json(preview_as_json(view) | {"rejected": [finding.as_json() for finding in rejected]}
                 | ({"suggestions": suggestions} if suggest else {}))
    else:
        put("\n".join([outlook_tables(view, width=screen_width(), every=every), *rejected_lines(rejected, every=every),
                       *([suggestion_table(suggestions, batch_size, width=screen_width())] if suggest else [])]))
    require_steps(view.plan, view.shapes, view.left_out)
