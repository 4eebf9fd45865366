"""`prep compact`."""

from __future__ import annotations

from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json
from prep.cli.ticker import progress_unless
from prep.errors import CacheError
from prep.fs.place import place_of


def compact(
    cache: opt.CacheArg,
    shard_mib: Annotated[int, typer.Option(help="maximum size of a shard in MiB; shards below half of it are joined",
                                           min=1, max=4096)] = 256,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be joined; write nothing")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Join small shards of CACHE into few large ones. Manifests stay valid; exit 7 for damaged rows.

    In an object store, too: small shards are downloaded, new ones uploaded, and nothing is removed.
    """
    from prep.maintenance.compact import compact as join_all

    done = join_all(place_of(cache), shard_bytes=shard_mib << 20, dry_run=dry_run, progress=progress_unless(quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
    if done.lost:
        raise typer.Exit(CacheError.exit_code)
