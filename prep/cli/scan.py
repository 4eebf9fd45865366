"""`prep scan`."""

from __future__ import annotations

from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say, screen_width
from prep.cli.options import quiet_pillow
from prep.cli.signature import choice
from prep.cli.ticker import progress_unless
from prep.errors import EXIT_FINDINGS


def scan(
    source: opt.SourceArg,
    mask: Annotated[str | None, choice(
        help="where masks are (default: the recipe's setting, else auto)", words=("auto", "none", "sidecar", "alpha"),
        other="DIR")] = None,
    missing_mask: opt.MissingMask = None,
    references: opt.References = None,
    missing_reference: opt.MissingReference = None,
    edits: Annotated[Path | None, typer.Option(help="directory of edited captions and masks, which replace those "
                                               "beside the pictures (default: that of prep view --edit, if it has "
                                               "any), or none")] = None,
    sources: opt.Sources = None,
    model: Annotated[str | None, typer.Option(help="directory, single file or Hub id: name captions that its text "
                                              "encoders cut off")] = None,
    select: Annotated[list[str] | None, opt.codes_option(help="report only findings of this code; repeatable")] = None,
    ignore: Annotated[list[str] | None, opt.codes_option(help="report no findings of this code; repeatable")] = None,
    list_all: Annotated[bool, typer.Option("--all", help="list every finding by name, however many, as a pipe gets "
                                           "them anyway")] = False,
    html: Annotated[Path | None, typer.Option("--html", "--write-report", help="write a self-contained HTML page"
                                              )] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 for warnings, too")] = False,
    rehash: opt.Rehash = False,
    jobs: Annotated[int, typer.Option(help="processes that decode; with --engine ray each worker has as many as CPUs",
                                      min=1)] = opt.JOBS,
    engine: Annotated[str, choice(help="what decodes: this machine, or a Ray cluster", words=opt.ENGINES)] = "local",
    address: opt.Address = None,
    workers: Annotated[int | None, typer.Option(help="with --engine ray: workers, which share the CPUs of their nodes "
                                                "(default: one on each node)", min=1, show_default=False)] = None,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Check every picture, caption, mask and reference. Pictures are decoded to the last pixel; exit 1 for errors."""
    from prep.dataset.listing import picture_places
    from prep.pages.snapshot import check_page_file, origin_of
    from prep.report.snapshots.scan import write_scan_page
    from prep.report.terminal.scan import findings_table
    from prep.scan.run import ScanCall, run_scan
    from prep.scan.scanner import as_json as document
    from prep.workers.ray import ClusterOptions

    quiet_pillow()
    remote = opt.is_ray(engine, {"--address": address, "--workers": workers})
    recipe = opt.recipe_from_options(source, mask=mask, missing_mask=missing_mask, references=references,
                                     missing_reference=missing_reference, edits=edits, sources=sources)
    for line in () if quiet else recipe.notes:
        say(line)
    if html is not None:
        check_page_file(html, picture_places(recipe))
    report = run_scan(ScanCall(
        recipe=recipe, jobs=jobs, model=model, select=select or (), ignore=ignore or (), rehash=rehash,
        show=None if html is None else partial(write_scan_page, html, origin_of(recipe, date.today())),
        cluster=ClusterOptions(address=address or "", workers=workers) if remote else None,
        notice=(lambda _: None) if quiet else say, progress=progress_unless(quiet)))
    if as_json:
        put_json(document(report))
    else:
        put(findings_table(report.findings, pictures=report.pictures, usable=report.samples,
                           every=list_all or bool(select), width=screen_width()))
    if report.count("error") or not report.pictures or (strict and report.count("warning")):
        raise typer.Exit(EXIT_FINDINGS)
