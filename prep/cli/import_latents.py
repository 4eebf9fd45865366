"""`prep import`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say
from prep.cli.options import quiet_pillow
from prep.cli.signature import choice, with_options
from prep.cli.ticker import progress_unless
from prep.encode.options import EncodeOptions
from prep.errors import EXIT_FINDINGS
from prep.fs.place import place_of

ORIGINS = ("kohya-npz",)
# What the caches decide, or what they do not have.
WITHOUT = ("posterior", "tile", "step", "buckets", "sizes", "crop", "views", "min_bucket", "upscale")


@opt.with_recipe_options(without=WITHOUT)
@with_options("options", EncodeOptions, ("jobs", "rehash", "recheck", "download"))
def import_latents(
    source: Annotated[Path, typer.Argument(
        metavar="SOURCE", help="a directory of pictures with .npz files beside them, or a recipe .toml that names such",
        show_default=False)],
    origin: Annotated[str, choice("--from", words=ORIGINS, help="what made the latents; kohya-npz: sd-scripts' .npz "
                                  "files beside the pictures, of SD 1.x, 2.1, SDXL, SD 3, FLUX.1 or Lumina 2")],
    cache: opt.CacheOrNone = None,
    output: opt.Output = Path("manifest.json"),
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    verify: Annotated[int, typer.Option(help="latents that are compared with what the model's VAE makes of their "
                                        "pictures; 0: none, and the manifest says so", min=0)] = 8,
    bucket_no_upscale: Annotated[bool, typer.Option(
        "--bucket-no-upscale", help="sd-scripts had bucket_no_upscale: it cropped pictures with no more pixels than "
        "the square of --resolution without scaling them")] = False,
    device: opt.Device = "auto",
    options: EncodeOptions = EncodeOptions(),  # noqa: B008  # replaced by the options
    strict: opt.Strict = False,
    every: opt.Every = False,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Make a manifest of latents that sd-scripts cached; captions and masks are encoded.

    Pictures without a cache, or with one of another size, are skipped with a finding. The same command continues an
    interrupted import.
    """
    from prep.imports.run import ImportCall, run_import

    quiet_pillow()
    recipe = opt.recipe_from_options(source, **given)
    begun = time.monotonic()
    report = run_import(ImportCall(
        recipe=recipe, origin=origin, cache=opt.cache_of(cache, recipe), output=place_of(output), verify=verify,
        no_upscale=bucket_no_upscale, options=replace(options, device=device), progress=progress_unless(quiet)))
    seconds = time.monotonic() - begun
    for line in report.notices if not quiet else ():
        say(line)
    if as_json:
        put_json(report.as_json(seconds))
    else:
        put(report.as_text(seconds, every=every))
    if report.encoded.unmade or (strict and report.encoded.rejected):
        raise typer.Exit(EXIT_FINDINGS)


import_latents.__name__ = "import"  # the name of the command; no function can be defined so
