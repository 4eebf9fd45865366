"""`train init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli.console import put


def init(
    output: Annotated[Path, typer.Option("-o", "--output", help="the file to write")] = Path("train.toml"),
) -> None:
    """Write a commented train.toml with every setting and its default. Never replaces an existing file."""
    from prep.errors import PathError
    from prep.fs.atomic import create_exclusive, make_dirs
    from prep.fs.mirror import check_here
    from train.config.table import as_toml

    check_here(output, "settings file")
    make_dirs(output.absolute().parent)
    if output.is_symlink() or not create_exclusive(output, as_toml().encode()):
        raise PathError(f"{output} exists, expected a new file", hint="name another with -o")
    put(f"wrote {output}; train run MANIFEST -c {output} reads it")
