"""`prep mask`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import progress, put, put_json
from prep.cli.options import quiet_pillow

if TYPE_CHECKING:
    from prep.masks.run import Entry
    from prep.report.pages.frame import Origin


def mask(
    source: opt.SourceArg,
    method: Annotated[str, typer.Option("--with", help="alpha, color, threshold, clipseg, segment or rembg")],
    output: Annotated[Path, typer.Option("-o", "--output", help="directory for the masks, apart from the pictures")],
    color: Annotated[str, typer.Option("--color", help="background color of --with color")] = "white",
    tolerance: Annotated[int, typer.Option(help="how far a channel may be from it, 0 to 255", min=0, max=255)] = 16,
    threshold: Annotated[float | None, typer.Option(help="part of white, 0 to 1, from which a pixel trains")] = None,
    invert: Annotated[bool, typer.Option("--invert", help="train what would not be trained")] = False,
    smooth: Annotated[float, typer.Option(help="radius of a gaussian blur before the threshold, in pixels")] = 0,
    expand: Annotated[int, typer.Option(help="pixels that what trains grows by; negative: shrinks")] = 0,
    prompt: Annotated[list[str] | None, typer.Option(help="what --with clipseg looks for; may be repeated")] = None,
    label: Annotated[list[str] | None, typer.Option(help="class of --with segment; may be repeated")] = None,
    model: Annotated[str | None, typer.Option(help="a directory or a Hub id; of rembg, a name")] = None,
    download: Annotated[bool, typer.Option("--download", help="fetch a model that is not in the cache")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")] = "auto",
    batch_size: Annotated[int, typer.Option(help="pictures per forward pass of the model", min=1)] = 4,
    own: Annotated[str, typer.Option("--mask", help="where pictures' own masks are: auto (NAME-masklabel.png where "
                                    "there are any), none, sidecar, or a directory")] = "auto",
    combine: Annotated[str | None, typer.Option(help="with the mask there is: replace, add, subtract or intersect")]
    = None,
    naming: Annotated[str, typer.Option(help="onetrainer: NAME-masklabel.png, or kohya: NAME.png")] = "onetrainer",
    force: Annotated[bool, typer.Option("--force", help="make masks anew that are there already")] = False,
    html: Annotated[Path | None, typer.Option(help="a page that shows the masks over their pictures")] = None,
    jobs: opt.Jobs = opt.JOBS, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Write mask pictures into a directory of their own, to look at, edit, and encode with --mask DIR."""
    from prep.dataset.listing import picture_places
    from prep.masks.methods import MaskOptions
    from prep.masks.run import MaskCall, run_mask
    from prep.report.pages.frame import check_page_file, origin_of

    quiet_pillow()
    choice = MaskOptions(method=method, color=color, tolerance=tolerance,  # type: ignore[arg-type]  # checked there
                         threshold=threshold, invert=invert, smooth=smooth, expand=expand, prompts=tuple(prompt or ()),
                         labels=tuple(label or ()), combine=combine,  # type: ignore[arg-type]  # as above
                         naming=naming, force=force)  # type: ignore[arg-type]  # as above
    recipe = opt.recipe_from_options(source, mask=own)
    if html is not None:
        check_page_file(html, picture_places(recipe))
    masked = run_mask(MaskCall(
        recipe=recipe, choice=choice, output=output, model=model or "",
        show=None if html is None else partial(_write_pages, html, origin_of(recipe, date.today()), jobs, not quiet),
        device=device, batch_size=batch_size, jobs=jobs, download=download,
        progress=lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet)))
    if as_json:
        put_json(masked.as_json())
    else:
        put(masked.as_text())


def _write_pages(page: Path, origin: Origin, jobs: int, shown: bool, entries: Sequence[Entry]) -> tuple[Path, ...]:
    from prep.report.pages.masks import write_sheets

    with progress("showing", len(entries), unit="pictures", shown=shown) as tick:
        return write_sheets(page, origin, entries, jobs=jobs, tick=tick)
