"""`prep prompts`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json
from prep.cli.ticker import progress_unless
from prep.fs.place import place_of


def prompts(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a prompt file: prompt --n negative --w 512 --h 768 "
                                         "--d seed --s steps --l guidance --ref picture --mask mask, one a line",
                                         show_default=False)],
    manifest: Annotated[Path, typer.Option(help="the manifest whose prompts are replaced", show_default=False)],
    model: Annotated[str | None, typer.Option(help="the model that encoded the cache (default: the manifest's)",
                                              show_default=False)] = None,
    device: opt.Device = "auto",
    download: opt.Download = False, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Replace a manifest's sample prompts. Reads no pictures, and encodes only rows that the cache lacks."""
    from prep.encode.prompts import PromptsCall, run_prompts

    begun = time.monotonic()
    report = run_prompts(PromptsCall(
        file=file, manifest=place_of(manifest), model=model, device=device, download=download,
        progress=progress_unless(quiet)))
    if as_json:
        put_json(report.as_json(time.monotonic() - begun))
    else:
        put(report.as_text(time.monotonic() - begun))
