"""`train report`."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.console import put, put_json
from prep.errors import UsageError
from prep.fs.place import OUTPUT, maybe_place, place_of, require_local
from train.cli import options as opt

if TYPE_CHECKING:
    from train.report.page import Written


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run, finished or not, "
                                           "or its URL: s3://bucket/runs/cat", show_default=False)],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="the HTML page to write; replaces only an "
                                                "earlier page (default: RUN/report.html; of a run in a store, "
                                                "report.html)")] = None,
    worst: Annotated[int, typer.Option(help="how many of the worst samples to show; 0: none", min=0, max=500)] = 24,
    manifest: Annotated[Path | None, typer.Option(help="the manifest, if it has moved since training")] = None,
    cache: opt.MovedCache = None,
    as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Write one HTML page about a run: curves, samples through time, worst samples, settings, provenance."""
    from prep.cli.ticker import progress
    from prep.images.decode import quiet_pillow
    from train.report.page import write_report
    from train.runs.stored.reading import for_report

    if output is not None:
        require_local(output, "output", OUTPUT, UsageError)
    quiet_pillow()
    with progress("reading the run", None, shown=not quiet):
        written = write_report(for_report(place_of(folder)), output, date.today(), worst=worst,
                               manifest=maybe_place(manifest), cache=maybe_place(cache))
    if as_json:
        put_json(_as_json(written))
    else:
        put(str(written.path))


def _as_json(written: Written) -> dict[str, Any]:
    history, best = written.history, written.history.lowest
    last, smooth = history.held_out[-1:], history.smooth[-1:]
    return {"format": "latentry/report", "version": 1, "output": str(written.path), "bytes": written.size,
            "status": history.status, "step": history.step, "steps": history.steps or None,
            "loss": round(smooth[0][1], 8) if smooth else None, "validation": last[0][1] if last else None,
            "lowest": None if best is None else {"step": best[0], "loss": best[1]},
            "samples_per_second": round(history.samples / history.seconds, 4) if history.seconds else None,
            "resumed": sum(step > 0 for step in history.starts), "prompts": written.prompts, "worst": written.worst,
            "warnings": history.warnings}
