"""`prep diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, screen_width
from prep.errors import EXIT_FINDINGS, CacheError
from prep.fs.place import place_of


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="a manifest.json", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="another manifest, or a later version", show_default=False)],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="exit with 1 if they differ")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Show what changed from manifest A to manifest B. Compares samples, rows, buckets, models, prompts, findings."""
    from prep.manifest.diff import compare
    from prep.manifest.document import read_manifest
    from prep.report.terminal.diff import changes_text

    document = compare(read_manifest(place_of(a)), read_manifest(place_of(b)))
    if as_json:
        put_json(document)
    else:
        put(changes_text(document, width=screen_width()))
    if exit_code and not document["same"]:
        raise typer.Exit(EXIT_FINDINGS if document["same"] is False else CacheError.exit_code)
