"""`prep scan`."""

from __future__ import annotations

from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import progress, put, put_json
from prep.cli.options import quiet_pillow
from prep.errors import EXIT_FINDINGS


def scan(
    source: opt.SourceArg,
    mask: opt.Mask = None,
    model: Annotated[str | None, typer.Option(help="count captions' tokens for this pipeline directory or id")] = None,
    select: Annotated[list[str] | None, typer.Option(help="only findings of this code; may be repeated")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="no findings of this code; may be repeated")] = None,
    every: Annotated[bool, typer.Option("--all", help="every finding by name, however many there are")] = False,
    html: Annotated[Path | None, typer.Option("--html", "--write-report",
                                              help="write one self-contained HTML page")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 for warnings, too")] = False,
    rehash: Annotated[bool, typer.Option("--rehash", help="read every file again, whatever its stamps say")] = False,
    jobs: Annotated[int, typer.Option(help="processes that decode", min=1)] = opt.JOBS,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Decode every picture, read every caption and mask, and say what is wrong with them. Exit 1 for errors."""
    from prep.dataset.listing import picture_places
    from prep.report.pages.frame import check_page_file, origin_of
    from prep.report.pages.scan import write_scan_page
    from prep.report.terminal.scan import findings_table
    from prep.scan.run import ScanCall, run_scan
    from prep.scan.scanner import as_json as document

    quiet_pillow()
    recipe = opt.recipe_from_options(source, mask=mask)
    if html is not None:
        check_page_file(html, picture_places(recipe))
    report = run_scan(ScanCall(
        recipe=recipe, jobs=jobs, model=model, select=select or (), ignore=ignore or (), rehash=rehash,
        show=None if html is None else partial(write_scan_page, html, origin_of(recipe, date.today())),
        progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet)))
    if as_json:
        put_json(document(report))
    else:
        put(findings_table(report.findings, pictures=report.pictures, usable=report.samples,
                           every=every or bool(select)))
    if report.count("error") or not report.pictures or (strict and report.count("warning")):
        raise typer.Exit(EXIT_FINDINGS)
