"""`prep embed`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say, screen_width
from prep.cli.options import quiet_pillow
from prep.cli.signature import with_options
from prep.cli.ticker import progress_unless
from prep.encode.options import EncodeOptions
from prep.errors import EXIT_FINDINGS


@opt.with_recipe_options(without=("model", "dtype", "compute", "max_length", "clip_skip", "text_windows",
                                  "text_quantization", "posterior", "tile", "missing_caption", "embed", "prompts"))
@with_options("options", EncodeOptions, only=("device", "jobs", "grace", "retry_rejects", "rehash", "download"))
def embed(
    source: opt.SourceArg,
    model: Annotated[str | None, typer.Option(
        "--model", help="the vision model, DINOv2, SigLIP or CLIP: a directory or a Hub id (default: that of the "
        "recipe's [embed])", show_default=False)] = None,
    cache: opt.CacheOrNone = None,
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    options: EncodeOptions = EncodeOptions(),  # noqa: B008  # replaced by the options
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show how many embeddings are missing; write nothing")
                       ] = False,
    strict: opt.Strict = False,
    every: opt.Every = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Find near-duplicates, outliers and more by an embedding of each picture, before anything is encoded; with SigLIP
    or CLIP also captions that do not fit. The embeddings, made by a vision model, stay in the cache."""
    from dataclasses import replace

    from prep.embedding.run import EmbedCall, run_embed
    from prep.report.terminal.scan import finding_parts
    from prep.report.terminal.tables import page

    quiet_pillow()
    begun = time.monotonic()
    recipe = opt.recipe_from_options(source, **given, embed=model)
    report = run_embed(EmbedCall(recipe=recipe, cache=opt.cache_of(cache, recipe),
                                 options=replace(options, dry_run=dry_run), progress=progress_unless(quiet)))
    for line in () if quiet else report.notices:
        say(line)
    seconds = time.monotonic() - begun
    if as_json:
        put_json(report.as_json(seconds))
    else:
        put(page(*finding_parts([each.as_json() for each in report.findings], width=screen_width(), every=every),
                 *report.as_text(seconds, every=every).split("\n"), width=screen_width()))
    if report.unmade or (strict and report.rejected):
        raise typer.Exit(EXIT_FINDINGS)
