"""`train init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli.console import put
from train.cli.options import SETTINGS_FILE


def init(
    output: Annotated[Path, typer.Option("-o", "--output", help="the file to write")] = Path("train.toml"),
) -> None:
    """Write a commented train.toml with every setting and its default. Never replaces an existing file."""
    from prep.errors import PathError
    from prep.fs.atomic import make_dirs, write_published
    from prep.fs.place import require_here
    from prep.training.table import as_toml

    require_here(output, "settings file")
    make_dirs(output.absolute().parent)
    if output.is_symlink() or output.exists():
        raise PathError(f"{output} exists, expected a new file", hint="name another with -o")
    write_published(output, as_toml().encode())
    named = "" if output.name == SETTINGS_FILE and output.parent == Path() else f" -c {output}"
    put(f"wrote {output}; train run MANIFEST{named} reads it")
