"""`prep export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json
from prep.cli.signature import choice
from prep.cli.ticker import progress_unless
from prep.export.formats import FORMATS
from prep.fs.place import place_of


def export(
    manifest: opt.ManifestArg,
    to: Annotated[str, choice("--to", words=FORMATS, help="safetensors: a file a sample; webdataset: tars; kohya: "
                              "pictures with sd-scripts' caches and dataset.toml; folder: pictures with captions and "
                              "masks; ai-toolkit, musubi, diffusion-pipe: pictures and a configuration of the data")],
    output: Annotated[Path, typer.Option("-o", "--output", help="a new directory", show_default=False)],
    tar_mib: Annotated[int, typer.Option(help="with --to webdataset: size of a tar in MiB", min=1, max=1 << 16)] = 1024,
    held_out: Annotated[bool, typer.Option("--held-out", help="with --to kohya, folder and other trainers: write the "
                                           "validation pictures, too, in a directory of their own")] = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Write the samples of a manifest for other programs.

    As safetensors, WebDataset tars, sd-scripts' caches, a folder, or the data of another trainer. The same command
    continues an interrupted export.
    """
    from prep.export.run import export as run_export

    done = run_export(place_of(manifest), to, output, tar_bytes=tar_mib << 20, held_out=held_out,
                      progress=progress_unless(quiet))
    if as_json:
        put_json(done.as_json())
    else:
        put(done.as_text())
