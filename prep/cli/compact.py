"""`prep compact`."""

from __future__ import annotations

from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import progress, put, put_json
from prep.errors import CacheError


def compact(
    cache: opt.CacheArg,
    shard_mib: Annotated[int, typer.Option(help="size of a shard in MiB, at most; below half of it is small", min=1,
                                           max=4096)] = 256,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be joined")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Join many small shards of CACHE into few; rows stay, manifests stay valid. Exit 7 for damaged rows."""
    from prep.maintenance.compact import compact as join_all

    done = join_all(cache, shard_bytes=shard_mib << 20, dry_run=dry_run,
                    progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
    if done.lost:
        raise typer.Exit(CacheError.exit_code)
