"""`prep clean`."""

from __future__ import annotations

from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be removed, and its size")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Forget what earlier runs read from your files; the next run reads them again. Nothing else is removed."""
    from prep.maintenance.clean import clean as remove_memories

    done = remove_memories(dry_run=dry_run)
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
