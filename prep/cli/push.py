"""`prep push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json
from prep.cli.ticker import progress_unless
from prep.fs.place import place_of


def push(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="the manifest.json that prep encode wrote",
                                             show_default=False)],
    url: Annotated[Path, typer.Argument(metavar="URL", help="where it goes, like s3://bucket/dataset; also gs:// and "
                                        "az://. Credentials come from the environment", show_default=False)],
    recheck: Annotated[bool, typer.Option("--recheck", help="read all that is there, and send what is damaged"
                                          )] = False,
    jobs: Annotated[int, typer.Option(help="shards to send at a time", min=1)] = 8,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Upload a manifest and its cache to an object store, where train run reads them. Sends only what is not there."""
    from prep.maintenance.push import push as upload

    done = upload(place_of(manifest), place_of(url), recheck=recheck, jobs=jobs, progress=progress_unless(quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
