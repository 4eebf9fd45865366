"""`prep gc`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say
from prep.cli.ticker import progress_unless
from prep.fs.place import place_of


def gc(
    cache: opt.CacheArg,
    more: Annotated[list[Path] | None, typer.Argument(metavar="MANIFEST", show_default=False, help="more manifests "
                                                      "to keep, so that --keep *.json works")] = None,
    keep: Annotated[list[Path] | None, typer.Option("--keep", help="a manifest whose rows to keep; repeatable",
                                                    show_default=False)] = None,
    older_than: Annotated[str, typer.Option(help="keep whatever is newer: 0, 30m, 12h, 7d")] = "24h",
    abandon: Annotated[list[str] | None, typer.Option(
        "--abandon", metavar="PLAN", help="the plan of an encode that nobody will finish, by the first digits of its "
        "name: remove it, and what only it needs; repeatable", show_default=False)] = None,
    yes: Annotated[bool, typer.Option("--yes", help="remove; without it, only show what would be removed")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Remove from CACHE what no kept manifest uses. Without --yes, only show what would be removed."""
    from prep.maintenance.gc import collect_garbage

    guard = opt.seconds_of(older_than, "--older-than")
    manifests = [place_of(place) for place in (*keep, *(more or ()))] if keep else []
    done = collect_garbage(place_of(cache), manifests, guard=guard, older_than=older_than,
                           dry_run=not yes, abandon=abandon or (), notice=(lambda _: None) if quiet else say,
                           progress=progress_unless(quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
