"""`prep unpack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json
from prep.cli.ticker import progress_unless


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar", help="a tar that prep pack wrote", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where manifest and cache go; made if missing",
                                           show_default=False)],
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Unpack a tar of prep pack, and check every digest; what is there already is kept.

    The same command continues an interrupted one.
    """
    from prep.export.packed.unpack import unpack as read_tar

    done = read_tar(file, folder, progress=progress_unless(quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
