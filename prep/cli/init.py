"""`prep init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say
from prep.cli.ticker import progress


def init(
    sources: Annotated[list[Path] | None, typer.Argument(
        metavar="[SOURCE]...", show_default=False,
        help="directories of pictures, .tar files (braces and globs), or kohya's project (img, reg, mask)")] = None,
    other: Annotated[Path | None, typer.Option("--from", metavar="FILE", help="convert another tool's file instead: "
                                               "kohya's dataset TOML or training configuration, OneTrainer's concepts "
                                               "or main configuration, SimpleTuner's multidatabackend.json, "
                                               "musubi-tuner's TOMLs, ai-toolkit's YAML, "
                                               "diffusion-pipe's TOMLs")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", show_default=False, help="the recipe to write "
                                                "(default: dataset.toml; recipe.toml if FILE is that)")] = None,
    model: Annotated[str | None, typer.Option(help="a diffusers directory, a single file, or a Hub id")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing recipe")] = False,
    jobs: opt.Jobs = opt.JOBS, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Write a commented recipe for pictures, or from another tool's file."""
    from prep.images.decode import quiet_pillow
    from prep.recipe.init import check_choice, check_target, init_from_file, init_from_sources, target_of

    check_choice(sources or (), other, model)
    output = target_of(output, other)
    check_target(output, force)
    if sources:
        quiet_pillow()
        with progress("looking", None, unit="pictures", shown=not quiet) as tick:
            written = init_from_sources(sources, output, model=model, jobs=jobs, tick=tick)
    else:
        assert other is not None, "checked above"
        written = init_from_file(other, output, force=force)
    if not quiet:
        for line in written.notices:
            say(line)
    if as_json:
        put_json(written.as_json())
    else:
        put(written.as_text())
