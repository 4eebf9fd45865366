"""`prep bucket --html`: one page with the pictures' sizes against the buckets, and what the buckets do to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.cache.files import write_whole
from prep.outlook import Outlook, as_json
from prep.recipe import Recipe
from prep.report.frame import check_page_file, framed, sections, table
from prep.report.plot import bucket_plot
from prep.report.words import size_of
from prep.survey import picture_places

ROWS = 1000  # pictures in a list; `prep bucket --json` has them all


def check_bucket_page(recipe: Recipe, path: Path) -> None:
    """Raises `PathError` unless a page may be written to `path`: apart from the pictures, over nothing but a page."""
    check_page_file(path, picture_places(recipe))


def write_bucket_page(outlook: Outlook, path: Path) -> None:
    """Writes the page to `path`, whole or not at all."""
    write_whole(path, bucket_page(outlook).encode())


def bucket_page(outlook: Outlook) -> str:
    """The page of an outlook."""
    document = as_json(outlook)
    sizes = Counter({one.index: one.size for one in outlook.bucketing.pictures}.values())
    inside = {(one["size"][0], one["size"][1]): one["pictures"] for one in document["buckets"]}
    return framed("Buckets", sections([
        ("Sizes and buckets", bucket_plot(sizes, inside) or "<p>none</p>"),
        ("Buckets", _buckets(document)),
        ("Most cut away", _pictures(document, "crop_loss", least=0.0)),
        ("Most enlarged", _pictures(document, "scale", least=1.0)),
        ("Findings", table(("severity", "code", "file", "what"), [
            (one["severity"], one["code"], one["path"], one["detail"]) for one in document["findings"][:ROWS]])),
    ]))


def _buckets(document: Mapping[str, Any]) -> str:
    rows = [(size_of(one["size"]), *(str(one[name]) for name in ("pictures", "samples", "showings", "batches")),
             "-".join(f"{scale:.2f}" for scale in one["scale"]), f"{one['crop_loss']['mean']:.1f}",
             f"{one['crop_loss']['worst']:.1f}", str(one["upscaled"])) for one in document["buckets"]]
    heads = ("bucket", "pictures", "to train", "an epoch", "micro-batches", "scale", "cut %", "worst", "enlarged")
    return table(heads, rows, numbers=range(1, 9))


def _pictures(document: Mapping[str, Any], what: str, *, least: float) -> str:
    """The pictures above `least`, the worst first."""
    above = (one for one in document["pictures"] if one[what] > least)
    worst = sorted(above, key=lambda one: (-one[what], one["name"]))
    rows = [(one["name"], size_of(one["size"]), size_of(one["bucket"]), f"{one['crop_loss']:.1f}",
             f"{one['scale']:.2f}") for one in worst[:ROWS]]
    more = f"<p>and {len(worst) - ROWS} more</p>" if len(worst) > ROWS else ""
    return table(("file", "size", "bucket", "cut %", "scale"), rows, numbers=(3, 4)) + more if rows else "<p>none</p>"
