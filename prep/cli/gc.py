"""`prep gc`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import progress, put, put_json, say


def gc(
    cache: opt.CacheArg,
    more: Annotated[list[Path] | None, typer.Argument(metavar="MANIFEST", show_default=False, help="further manifests "
                                                      "to keep, so that --keep *.json names them all")] = None,
    keep: Annotated[list[Path] | None, typer.Option("--keep", help="a manifest whose rows stay; may be repeated",
                                                    show_default=False)] = None,
    older_than: Annotated[str, typer.Option(help="what is younger stays: 0, 30m, 12h, 7d")] = "24h",
    yes: Annotated[bool, typer.Option("--yes", help="remove it; without, only say what would be removed")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Remove from CACHE what no kept manifest names. Shows what would be removed, unless --yes."""
    from prep.maintenance.gc import collect_garbage

    guard = opt.seconds_of(older_than, "--older-than")
    done = collect_garbage(cache, [*keep, *(more or ())] if keep else [], guard=guard, asked=older_than,
                           dry_run=not yes, notice=(lambda _: None) if quiet else say,
                           progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
