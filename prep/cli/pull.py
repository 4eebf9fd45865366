"""`prep pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json
from prep.cli.ticker import progress_unless
from prep.fs.place import place_of


def pull(
    url: Annotated[Path, typer.Argument(metavar="URL", help="a manifest, like s3://bucket/dataset/manifest.json; also "
                                        "gs:// and az://", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where manifest and cache go; made if missing",
                                           show_default=False)],
    recheck: Annotated[bool, typer.Option("--recheck", help="read all that is here, and download what is damaged"
                                          )] = False,
    jobs: Annotated[int, typer.Option(help="shards to download at a time", min=1)] = 8,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Download a manifest and its cache from an object store. Training needs no pull: it reads from the store."""
    from prep.maintenance.pull import pull as download

    done = download(place_of(url), folder, recheck=recheck, jobs=jobs, progress=progress_unless(quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
