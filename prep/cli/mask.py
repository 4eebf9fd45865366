"""`prep mask`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say
from prep.cli.options import quiet_pillow
from prep.cli.signature import choice
from prep.cli.ticker import progress, progress_unless
from prep.errors import EXIT_FINDINGS

if TYPE_CHECKING:
    from prep.masks.run import MaskEntry
    from prep.pages.snapshot import PageOrigin

METHODS = ("alpha", "color", "threshold", "clipseg", "segment", "rembg")
COMBINE = ("replace", "add", "subtract", "intersect")
NAMING = ("onetrainer", "kohya")


def mask(
    source: opt.SourceArg,
    method: Annotated[str, choice("--with", help="how masks are made", words=METHODS)],
    output: Annotated[Path, typer.Option("-o", "--output", help="directory for the masks, outside the pictures'")],
    color: Annotated[str, typer.Option("--color", help="background color of --with color")] = "white",
    tolerance: Annotated[int, typer.Option(help="how far a channel may differ from it", min=0, max=254)] = 16,
    threshold: Annotated[float | None, typer.Option(help="brightness, 0 to 1, from which a pixel trains")] = None,
    invert: Annotated[bool, typer.Option("--invert", help="swap what trains and what does not")] = False,
    smooth: Annotated[float, typer.Option(help="radius in pixels of a Gaussian blur before the threshold")] = 0,
    expand: Annotated[int, typer.Option(help="grow the area that trains by this many pixels; negative: shrink")] = 0,
    prompt: Annotated[list[str] | None, typer.Option(help="what --with clipseg looks for; repeatable")] = None,
    label: Annotated[list[str] | None, typer.Option(help="class for --with segment; repeatable")] = None,
    model: Annotated[str | None, typer.Option(help="a directory or a Hub id; for rembg, a model's name")] = None,
    download: opt.Download = False,
    device: opt.Device = "auto",
    batch_size: Annotated[int, typer.Option(help="pictures per forward pass of the model", min=1)] = 4,
    own: Annotated[str, choice("--mask", help="where the pictures' own masks are; auto: NAME-masklabel.png, if any",
                               words=("auto", "none", "sidecar"), other="DIR")] = "auto",
    sources: opt.Sources = None,
    combine: Annotated[str | None, choice(help="combine with the existing mask", words=COMBINE)] = None,
    naming: Annotated[str, choice(help="onetrainer: NAME-masklabel.png, kohya: NAME.png",
                                  words=NAMING)] = "onetrainer",
    force: Annotated[bool, typer.Option("--force", help="replace existing masks")] = False,
    html: Annotated[Path | None, typer.Option(help="write an HTML page with the masks over their pictures")] = None,
    every: opt.Every = False,
    jobs: opt.Jobs = opt.JOBS, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Make masks in a directory of their own. Check them, edit them, and encode with --mask DIR."""
    from prep.dataset.listing import picture_places
    from prep.masks.methods import MaskOptions
    from prep.masks.run import MaskCall, run_mask
    from prep.pages.snapshot import check_page_file, origin_of

    quiet_pillow()
    choice = MaskOptions(method=method, color=color, tolerance=tolerance,  # type: ignore[arg-type]  # checked there
                         threshold=threshold, invert=invert, smooth=smooth, expand=expand, prompts=tuple(prompt or ()),
                         labels=tuple(label or ()), combine=combine,  # type: ignore[arg-type]  # as above
                         naming=naming, force=force)  # type: ignore[arg-type]  # as above
    recipe = opt.recipe_from_options(source, mask=own, sources=sources)
    for line in () if quiet else recipe.notes:
        say(line)
    if html is not None:
        check_page_file(html, picture_places(recipe))
    masked = run_mask(MaskCall(
        recipe=recipe, choice=choice, output=output, model=model or "",
        show=None if html is None else partial(_write_pages, html, origin_of(recipe, date.today()), jobs, not quiet),
        device=device, batch_size=batch_size, jobs=jobs, download=download, progress=progress_unless(quiet)))
    if as_json:
        put_json(masked.as_json())
    else:
        put(masked.as_text(every=every))
    if any(finding.code == "unreadable-file" for finding in masked.made.findings):  # the same command may do them later
        raise typer.Exit(EXIT_FINDINGS)


def _write_pages(page: Path, origin: PageOrigin, jobs: int, shown: bool,
                 entries: Sequence[MaskEntry]) -> tuple[Path, ...]:
    from prep.report.snapshots.masks import write_sheets

    with progress("showing", len(entries), unit="pictures", shown=shown) as tick:
        return write_sheets(page, origin, entries, jobs=jobs, tick=tick)
