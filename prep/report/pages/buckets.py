"""`prep bucket --html` and `--png`: the pictures' sizes against the buckets, and what the buckets do to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.dataset.listing import picture_places
from prep.dataset.preview import EpochPreview, preview_as_json
from prep.formatting import format_size
from prep.fs.atomic import write_atomic
from prep.fs.paths import NamedPath, check_disjoint, check_replaceable
from prep.geometry import Size
from prep.recipe.schema import Recipe
from prep.report.pages.bucket_plot import bucket_plot
from prep.report.pages.bucket_png import MARK, bucket_png
from prep.report.pages.frame import check_page_file, render_page, sections, table

ROWS = 1000  # pictures in a list; `prep bucket --json` has them all


def check_bucket_files(recipe: Recipe, page: Path | None, plot: Path | None) -> None:
    """Raises `PathError` unless they may be written: apart from the pictures and each other, over nothing but a page,
    or a plot."""
    if page is not None and plot is not None:
        check_disjoint([NamedPath(role="page", path=page), NamedPath(role="plot", path=plot)])
    if page is not None:
        check_page_file(page, picture_places(recipe))
    if plot is not None:
        for pictures in picture_places(recipe):
            check_disjoint([pictures, NamedPath(role="plot", path=plot)])
        check_replaceable(plot, "plot", lambda start: not start or MARK in start)


def write_bucket_files(outlook: EpochPreview, page: Path | None, plot: Path | None) -> None:
    """Writes the page and the plot, each whole or not at all."""
    if page is not None:
        write_atomic(page, bucket_page(outlook).encode())
    if plot is not None:
        write_atomic(plot, bucket_png(*_sizes(outlook)))


def _sizes(outlook: EpochPreview) -> tuple[Mapping[Size, int], Mapping[Size, int]]:
    """How many pictures have a size, and how many are in a bucket."""
    sizes = Counter({one.index: one.size for one in outlook.bucketing.pictures}.values())
    return sizes, {(one["size"][0], one["size"][1]): one["pictures"] for one in preview_as_json(outlook)["buckets"]}


def bucket_page(outlook: EpochPreview) -> str:
    """The page of an outlook."""
    document = preview_as_json(outlook)
    return render_page("Buckets", sections([
        ("Sizes and buckets", bucket_plot(*_sizes(outlook)) or "<p>none</p>"),
        ("Buckets", _buckets(document)),
        ("Most cut away", _pictures(document, "crop_loss", least=0.0)),
        ("Most enlarged", _pictures(document, "scale", least=1.0)),
        ("Findings", table(("severity", "code", "file", "what"), [
            (one["severity"], one["code"], one["path"], one["detail"]) for one in document["findings"][:ROWS]])),
    ]))


def _buckets(document: Mapping[str, Any]) -> str:
    rows = [(format_size(one["size"]), *(str(one[name]) for name in ("pictures", "samples", "showings", "batches")),
             "-".join(f"{scale:.2f}" for scale in one["scale"]), f"{one['crop_loss']['mean']:.1f}",
             f"{one['crop_loss']['worst']:.1f}", str(one["upscaled"])) for one in document["buckets"]]
    heads = ("bucket", "pictures", "to train", "an epoch", "micro-batches", "scale", "cut %", "worst", "enlarged")
    return table(heads, rows, numbers=range(1, 9))


def _pictures(document: Mapping[str, Any], what: str, *, least: float) -> str:
    """The pictures above `least`, the worst first."""
    above = (one for one in document["pictures"] if one[what] > least)
    worst = sorted(above, key=lambda one: (-one[what], one["name"]))
    rows = [(one["name"], format_size(one["size"]), format_size(one["bucket"]), f"{one['crop_loss']:.1f}",
             f"{one['scale']:.2f}") for one in worst[:ROWS]]
    more = f"<p>and {len(worst) - ROWS} more</p>" if len(worst) > ROWS else ""
    return table(("file", "size", "bucket", "cut %", "scale"), rows, numbers=(3, 4)) + more if rows else "<p>none</p>"
