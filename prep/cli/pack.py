"""`prep pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json
from prep.cli.ticker import progress_unless
from prep.fs.place import place_of


def pack(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="a manifest.json on this computer",
                                             show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="the tar to write, a new file", show_default=False)],
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Write a manifest and what it needs of its cache to one tar, for another computer: see prep unpack.

    Other rows of the cache, and the pictures, stay out. Every digest is checked on the way.
    """
    from prep.export.packed.pack import pack as write_tar

    done = write_tar(place_of(manifest), output, progress=progress_unless(quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
