"""`prep demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli.console import put


def demo(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new or empty directory", show_default=False)],
) -> None:
    """Write a small dataset, a tiny model and recipes to try. Nothing is downloaded."""
    from prep.demo import write_demo
    from prep.fs.place import require_local

    require_local(directory, "DIR")
    write_demo(directory)
    put(f"wrote pictures, prompts and recipes to {directory}, and a tiny model to {directory / 'model'}")
