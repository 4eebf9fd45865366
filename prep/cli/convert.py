"""`prep convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put
from prep.cli.ticker import progress
from prep.formatting import counted
from prep.fs.place import require_local
from prep.runtime import defer_interrupts


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="a single-file checkpoint "
                                         "(.safetensors)")],
    config: Annotated[str, typer.Option("--config", metavar="DIR", show_default=False, help="a diffusers pipeline "
                                        "directory of the same architecture, or a Hub id: its configs and tokenizers, "
                                        "and weights that FILE lacks")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", show_default=False,
                                         help="the diffusers directory to write")],
    download: opt.Download = False, quiet: opt.Quiet = False,
) -> None:
    """Convert a single-file checkpoint to a diffusers directory, which --model takes."""
    from prep.models.hub import CONFIGS, PIPELINE, locate

    for role, path in (("FILE", file), ("--config", Path(config)), ("OUT", output)):
        require_local(path, role)
    with defer_interrupts():
        from prep.models.checkpoints.single_file import check_target, is_whole
        from prep.models.checkpoints.single_file import convert as convert_file
    check_target(output)
    there = locate(config, download=download, parts=CONFIGS if is_whole(file) else PIPELINE)
    with progress("converting", None, shown=not quiet):
        done = convert_file(file, there, output)
    put(f"wrote {output}" + (f"; {counted(done.scaled, 'weight')} of 8 bits times their scales, as bfloat16"
                             if done.scaled else ""))
