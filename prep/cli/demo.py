"""`prep demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli.console import put


def demo(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new or empty directory", show_default=False)],
    pairs: Annotated[bool, typer.Option("--pairs", help="edit training: pictures that were made from others, and a "
                                        "model that takes those as references")] = False,
) -> None:
    """Write a small dataset, a tiny model and recipes to try. Nothing is downloaded."""
    from prep.demo import write_demo
    from prep.fs.place import require_local

    require_local(directory, "DIR")
    if pairs:
        from prep.models.loading import quiet_libraries

        quiet_libraries()
    write_demo(directory, pairs=pairs)
    model = f"a tiny model to {directory / 'model'}"
    put(f"wrote pairs of pictures and recipes to {directory}, and {model}" if pairs else
        f"wrote pictures, prompts and recipes to {directory}, {model}, and a tiny vision model to "
        f"{directory / 'vision'}")
