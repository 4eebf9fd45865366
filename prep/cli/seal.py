"""`prep seal`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.encode import tell
from prep.cli.options import quiet_pillow
from prep.cli.ticker import progress_unless
from prep.encode.parts import MOST
from prep.errors import EXIT_FINDINGS

OF_PARTS = "of prep encode --part, whose options may all be given; without effect here"


@opt.with_recipe_options()
def seal(
    source: opt.SourceArg,
    cache: opt.CacheOrNone = None,
    output: opt.Output = Path("manifest.json"),
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    parts: Annotated[int | None, typer.Option(
        help="N of the parts I/N, so that a message can name those with work left", min=1,
        max=MOST, show_default=False)] = None,
    jobs: opt.Jobs = opt.JOBS,
    rehash: Annotated[bool, typer.Option("--rehash", help="re-read every file, ignoring stamps")] = False,
    download: opt.Download = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 if pictures are skipped")] = False,
    device: Annotated[str, typer.Option(help=OF_PARTS, show_default=False)] = "",
    batch_size: Annotated[int | None, typer.Option(help=OF_PARTS, show_default=False)] = None,
    shard_mib: Annotated[int | None, typer.Option(help=OF_PARTS, show_default=False)] = None,
    encoder_memory: Annotated[float | None, typer.Option(help=OF_PARTS, show_default=False)] = None,
    compiled: Annotated[bool, typer.Option("--compile", help=OF_PARTS)] = False,
    grace: Annotated[float | None, typer.Option(help=OF_PARTS, show_default=False)] = None,
    max_rejects: Annotated[int | None, typer.Option(help=OF_PARTS, show_default=False)] = None,
    every: opt.Every = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Write the manifest once prep encode --part has encoded all parts; otherwise say what is missing.

    Takes the source and options of prep encode, encodes nothing, and needs no GPU.
    """
    from prep.encode.run import EncodeCall
    from prep.encode.seal import run_seal

    quiet_pillow()
    recipe = opt.recipe_from_options(source, **given)
    begun = time.monotonic()
    report = run_seal(EncodeCall.of_seal(
        recipe=recipe, cache=opt.cache_of(cache, recipe), output=output, jobs=jobs, rehash=rehash, download=download,
        progress=progress_unless(quiet)), parts)
    tell(report, time.monotonic() - begun, every=every, as_json=as_json, quiet=quiet)
    if strict and report.rejected:
        raise typer.Exit(EXIT_FINDINGS)
