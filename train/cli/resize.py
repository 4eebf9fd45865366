"""`train resize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.errors import UsageError
from prep.fs.place import OUTPUT, place_of, require_local
from prep.runtime import defer_interrupts
from train.cli import options as opt
from train.cli.reduced import Force, Keep, LoraOutput, show


def resize(
    lora: Annotated[Path, typer.Argument(metavar="LORA", help="a LoRA file of any trainer, a directory of PEFT, or the "
                                         "directory or URL of a run or of one of its checkpoints",
                                         show_default=False)],
    output: LoraOutput,
    rank: Annotated[int | None, typer.Option(help="the most that a layer has; a lower rank stays", min=1,
                                             max=4096)] = None,
    keep: Keep = None, force: Force = False, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Write a LoRA file of lower rank, and list what each layer keeps.

    Names and dtypes stay, alpha becomes the rank. With PEFT's adapter_config.json the output is a directory.
    """
    from prep.cli.ticker import progress
    from train.runs.stored.reading import for_merge

    if rank is None and keep is None:
        raise UsageError("--rank and --keep are missing, expected one of them", hint="--rank 8, or --keep 0.98")
    require_local(output, "output", OUTPUT, UsageError)
    source = for_merge(place_of(lora))
    with defer_interrupts():
        from train.merging.resize import ResizeRequest, resize

    request = ResizeRequest(lora=source.path, output=output, rank=rank, keep=keep, force=force)
    with progress("resizing", None, unit="layers", shown=not quiet) as tick:
        done = resize(request, tick)
    show("resize", done, {"lora": str(source), "rank": rank, "keep": keep}, as_json)
