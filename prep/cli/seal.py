"""`prep seal`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.encode import tell
from prep.cli.options import quiet_pillow
from prep.cli.signature import Command, append, kind_of, parameter, with_options
from prep.cli.ticker import progress_unless
from prep.encode.options import MOST_PARTS, EncodeOptions
from prep.errors import EXIT_FINDINGS
from prep.fs.place import place_of
from prep.setting import rows_of

OF_PARTS = "of prep encode --part, whose options may all be given; without effect here"
UNUSED = ("device", "batch_size", "shard_bytes", "encoder_memory", "compiled", "grace", "max_rejects")


def _of_parts(command: Command) -> Command:
    """`command` with options of prep encode that it takes but does not use."""
    kinds = {row.field: (kind_of(row), typer.Option(row.spec.flag, help=OF_PARTS, show_default=False))
             for row in rows_of(EncodeOptions) if row.field in UNUSED}
    return append(command, [
        parameter(name, Annotated[kind, option], False) if kind is bool else
        parameter(name, Annotated[kind | None, option], None) for name, (kind, option) in kinds.items()])


@opt.with_recipe_options()
@_of_parts
@with_options("options", EncodeOptions, ("jobs", "rehash", "download"))
def seal(
    source: opt.SourceArg,
    cache: opt.CacheOrNone = None,
    output: opt.Output = Path("manifest.json"),
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    parts: Annotated[int | None, typer.Option(
        help="N of the parts I/N, so that a message can name those with work left", min=1,
        max=MOST_PARTS, show_default=False)] = None,
    options: EncodeOptions = EncodeOptions(),  # noqa: B008  # replaced by the options
    strict: opt.Strict = False,
    every: opt.Every = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Write the manifest once prep encode --part has encoded all parts; otherwise say what is missing.

    Takes the source and options of prep encode, encodes nothing, and needs no GPU.
    """
    from prep.encode.prepare import EncodeCall
    from prep.encode.seal import run_seal

    quiet_pillow()
    recipe = opt.recipe_from_options(source, **given)
    begun = time.monotonic()
    report = run_seal(EncodeCall(
        recipe=recipe, cache=opt.cache_of(cache, recipe), output=place_of(output), options=options,
        progress=progress_unless(quiet)), parts)
    tell(report, time.monotonic() - begun, every=every, as_json=as_json, quiet=quiet)
    if strict and report.rejected:
        raise typer.Exit(EXIT_FINDINGS)
