"""`prep convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put
from prep.cli.ticker import progress
from prep.formatting import counted
from prep.fs.mirror import check_here


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="a single-file checkpoint "
                                         "(.safetensors)")],
    config: Annotated[Path, typer.Option("--config", metavar="DIR", show_default=False, help="a diffusers pipeline "
                                         "directory of the same architecture: its configs and tokenizers, and weights "
                                         "that FILE lacks")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", show_default=False,
                                         help="the diffusers directory to write")],
    quiet: opt.Quiet = False,
) -> None:
    """Convert a single-file checkpoint to a diffusers directory, which --model takes. Nothing is downloaded."""
    from prep.models.checkpoints.single_file import convert as convert_file

    for role, path in (("FILE", file), ("--config", config), ("OUT", output)):
        check_here(path, role)
    with progress("converting", None, shown=not quiet):
        done = convert_file(file, config, output)
    put(f"wrote {output}" + (f"; {counted(done.scaled, 'weight')} of 8 bits times their scales, as bfloat16"
                             if done.scaled else ""))
