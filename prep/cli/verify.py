"""`prep verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, screen_width
from prep.cli.ticker import progress
from prep.errors import CacheError
from prep.fs.place import maybe_place, place_of


def verify(
    manifest: opt.ManifestArg, cache: opt.MovedCache = None,
    quick: Annotated[bool, typer.Option("--quick", help="check sizes, documents and indexes, but no rows")] = False,
    jobs: Annotated[int, typer.Option(help="threads that read and hash", min=1)] = opt.JOBS,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Check every byte that a manifest depends on. Names each damaged row; exit 7 for damage."""
    from prep.maintenance.verify import verify as verify_all
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest
    from prep.report.terminal.manifest import verify_tables

    opened = open_manifest(read_manifest(place_of(manifest), cache=maybe_place(cache)))
    size = sum(field.bytes for field in opened.manifest.fields.values())
    with progress("verifying", size, unit="bytes", shown=not quiet) as tick:
        document = verify_all(opened, quick=quick, jobs=jobs, tick=tick)
    if as_json:
        put_json(document)
    else:
        put(verify_tables(document, width=screen_width(), recorded=opened.cache.records_damage))
    if not document["ok"]:
        raise typer.Exit(CacheError.exit_code)
