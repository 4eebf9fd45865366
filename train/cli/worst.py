"""`train worst`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.console import put, put_json
from prep.formatting import shell_name
from prep.fs.place import maybe_place, place_of
from train.cli import options as opt

if TYPE_CHECKING:
    from train.report.hardest import Hard


def worst(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run, or its URL",
                                           show_default=False)],
    count: Annotated[int, typer.Option("-n", "--count", help="how many samples", min=1)] = 20,
    manifest: Annotated[Path | None, typer.Option(help="the manifest, if it has moved since training")] = None,
    cache: opt.MovedCache = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the samples that a run learned least: highest loss, compared with others at about the same timestep."""
    from train.report.hardest import find_worst
    from train.runs.pictures import spelled
    from train.runs.stored.reading import for_losses

    hardest = find_worst(for_losses(place_of(folder)), count, maybe_place(manifest), maybe_place(cache))
    if as_json:
        put_json({"format": "latentry/worst", "version": 1, "showings": hardest.showings, "known": hardest.known,
                  "samples": [_as_json(each) for each in hardest.samples]})
        return
    put(f"{'ratio':>6}  {'loss':>8}  {'shown':>5}  picture")
    for each in hardest.samples:
        put(f"{each.ratio:6.2f}  {each.loss:8.4f}  {each.showings:5}  "
            + " + ".join([spelled(each.path, each.name, each.source, hardest.prefixes),
                          *(shell_name(str(path or name)) for name, path in each.references)]))


def _as_json(each: Hard) -> dict[str, Any]:
    return {"name": each.name, "source": each.source, "path": None if each.path is None else str(each.path),
            "ratio": each.ratio, "loss": each.loss, "showings": each.showings,
            **({"references": [{"name": name, "path": None if path is None else str(path)}
                               for name, path in each.references]} if each.references else {})}
