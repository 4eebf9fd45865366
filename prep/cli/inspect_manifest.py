"""`prep inspect`."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say, screen_width


def inspect(
    manifest: opt.ManifestArg,
    sample: Annotated[str | None, typer.Option(help="show everything about the sample of this name")] = None,
    html: Annotated[Path | None, typer.Option(help="write a self-contained HTML page with plots and a gallery")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show what a manifest holds: fields, shapes, buckets, models, findings."""
    from prep.manifest.describe import describe_manifest, describe_samples
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest
    from prep.report.terminal.manifest import inspect_tables, sample_text

    opened = open_manifest(read_manifest(manifest))
    if html is not None:
        from prep.images.decode import quiet_pillow
        from prep.report.pages.manifest import check_page, write_page

        quiet_pillow()
        check_page(opened, html)
        write_page(opened, html, date.today())
        say(f"wrote {html}")
    document = describe_manifest(opened) if sample is None else describe_samples(opened, sample)
    if as_json:
        put_json(document)
    elif html is None or sample is not None:
        show = inspect_tables if sample is None else sample_text
        put(show(document, width=screen_width()))
