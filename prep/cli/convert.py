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
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", show_default=False,
                                         help="the diffusers directory to write")],
    config: Annotated[str, typer.Option("--config", metavar="DIR", show_default=False, help="a diffusers pipeline "
                                        "directory of the same architecture, or a Hub id: its configs and tokenizers, "
                                        "and weights that FILE lacks (default: what this package has for SD 1.5, 2.1 "
                                        "and SDXL)")] = "",
    download: opt.Download = False, quiet: opt.Quiet = False,
) -> None:
    """Convert a single-file checkpoint to a diffusers directory. --model takes FILE itself, too."""
    from prep.models.hub import open_named
    from prep.models.named import NamedFile

    for role, path in (("FILE", file), ("--config", Path(config)), ("OUT", output)):
        require_local(path, role)
    with defer_interrupts():
        from prep.models.checkpoints.single_file import check_target
        from prep.models.checkpoints.single_file import convert as convert_file
    check_target(output)
    model = open_named(NamedFile(path=file, configs=config), download=download)
    with progress("converting", None, shown=not quiet):
        done = convert_file(model, output)
    put(f"wrote {output}" + (f"; {counted(done.scaled, 'weight')} of 8 bits times their scales, as bfloat16"
                             if done.scaled else ""))
