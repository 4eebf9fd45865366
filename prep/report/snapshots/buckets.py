"""Writes the page of `prep bucket --html`: picture sizes against buckets, crops, scales, and dropped pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prep.dataset.listing import picture_places
from prep.dataset.preview import EpochPreview, preview_as_json, summary_as_json
from prep.findings import Finding
from prep.formatting import bucket_name, format_size
from prep.fs.atomic import write_atomic
from prep.fs.paths import NamedPath, check_disjoint, check_replaceable
from prep.geometry import Size
from prep.pages.bucket_plot import NOTE, Plot, bucket_shapes
from prep.pages.parts import (
    CUTS,
    Column,
    Head,
    Histogram,
    Section,
    Stat,
    Table,
    bars_of,
    binned,
    findings_table,
    plural,
)
from prep.pages.snapshot import PageOrigin, check_page_file, render_snapshot
from prep.recipe.schema import Recipe
from prep.report.snapshots.bucket_png import MARK, bucket_png

ROWS = 500  # of a table
ELSEWHERE = "prep bucket --json lists every picture."
SCALES = (0.25, 0.5, 0.75, 1, 1.5, 2)  # factors: upper edges of bins; above 1, a picture is enlarged
NOTABLE_LOSS = 10.0  # percent of a picture's area; the head counts pictures that lose this or more


def check_bucket_files(recipe: Recipe, page: Path | None, plot: Path | None) -> None:
    """Raises `PathError` unless both files may be written.

    They must be apart from pictures and each other, and may replace only an earlier page or plot.
    """
    if page is not None and plot is not None:
        check_disjoint([NamedPath(role="page", path=page), NamedPath(role="plot", path=plot)])
    if page is not None:
        check_page_file(page, picture_places(recipe))
    if plot is not None:
        for pictures in picture_places(recipe):
            check_disjoint([pictures, NamedPath(role="plot", path=plot)])
        check_replaceable(plot, "plot", lambda start: not start or MARK in start)


def write_bucket_files(outlook: EpochPreview, page: Path | None, plot: Path | None, *, origin: PageOrigin,
                       rejected: Sequence[Finding]) -> None:
    """Writes the page and the plot, each atomically; `rejected`: findings of pictures that cannot be used."""
    if page is not None:
        write_atomic(page, bucket_page(outlook, origin, rejected).encode())
    if plot is not None:
        write_atomic(plot, bucket_png(*_sizes(outlook)))


def _sizes(outlook: EpochPreview) -> tuple[Mapping[Size, int], Mapping[Size, int]]:
    """Counts the pictures of each size and in each bucket."""
    sizes = Counter({picture.index: picture.size for picture in outlook.bucketing.pictures}.values())
    inside: Counter[Size] = Counter()
    for bucket in summary_as_json(outlook)["buckets"]:  # one size may have several, with other references
        inside[bucket["size"][0], bucket["size"][1]] += bucket["pictures"]
    return sizes, inside


def bucket_page(outlook: EpochPreview, origin: PageOrigin, rejected: Sequence[Finding] = ()) -> str:
    """Renders the page of a previewed epoch."""
    document = preview_as_json(outlook)
    findings = [finding.as_json() for finding in rejected] + document["findings"]
    tables = {
        "cut": _pictures(document, "crop_loss", "Pictures by crop loss", least=0.0),
        "enlarged": _pictures(document, "scale", "Pictures by enlargement", least=1.0),
        "left-out": _names(document["left_out"], "Pictures dropped in epoch 0"),
        "repeated": _names(document["repeated"], "Pictures repeated in epoch 0"),
        "merges": _merges(document),
        "findings": findings_table(findings, ROWS, ELSEWHERE),
    }
    titles = {"cut": "Largest crop losses", "enlarged": "Largest enlargements", "left-out": "Dropped in epoch 0",
              "repeated": "Repeated in epoch 0", "merges": "Merged buckets", "findings": "Findings"}
    shown = {name: table for name, table in tables.items() if table.rows or name == "findings"}
    sections = [
        Section(id="plot", title="Sizes and buckets", note=NOTE),
        Section(id="buckets", title="Buckets", count=len(document["buckets"])),
        *(Section(id=name, title=titles[name], count=len(table.rows) + table.more) for name, table in shown.items())]
    return render_snapshot("buckets.html", origin, head=_head(document, findings), sections=sections, tables=shown,
                           plot=Plot(bucket_shapes(*_sizes(outlook))), charts=_charts(document),
                           buckets=_buckets(document))


def _head(document: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> Head:
    pictures = {picture["name"] for picture in document["pictures"]}
    refused = {finding["path"] for finding in findings if finding["severity"] == "error"} - pictures
    cut = {picture["name"] for picture in document["pictures"] if picture["crop_loss"] >= NOTABLE_LOSS}
    enlarged = {picture["name"] for picture in document["pictures"] if picture["upscaled"]}
    whole = len(pictures) + len(refused)
    steps = document["steps_per_epoch"]
    todo, tone = _todo(len(refused), len(cut), len(enlarged))
    sides = ", ".join(str(rules["resolution"]) for rules in document["resolutions"])
    return Head(
        kind="Buckets", part=len(pictures) / whole if whole else None, todo=todo,
        tone=tone,  # type: ignore[arg-type]  # one of three
        what=f"{plural(whole, 'picture')}, {plural(len(document['buckets']), 'bucket')} at resolution {sides},",
        usable=(f"{len(pictures):,} of {plural(whole, 'picture')} fit a bucket: {plural(steps, 'step')} per epoch, "
                f"each of up to {plural(document['batch_size'], 'sample')}"),
        stats=(Stat(value=f"{len(document['buckets']):,}", label="buckets"),
               Stat(value=f"{steps:,}", label="steps per epoch"),
               Stat(value=f"{len(cut):,}", label=f"lose {NOTABLE_LOSS:.0f}% or more", tone="warning"),
               Stat(value=f"{len(enlarged):,}", label="enlarged", tone="info"),
               Stat(value=f"{len(refused):,}", label="skipped", tone="error")))


def _todo(refused: int, cut: int, enlarged: int) -> tuple[str, str]:
    """Returns what to do, and its severity."""
    if refused:
        return f"Repair or remove the {plural(refused, 'file')} with errors in Findings.", "error"
    if cut or enlarged:
        some = " and ".join(words for count, words in (
            (cut, f"{plural(cut, 'picture loses', 'pictures lose')} {NOTABLE_LOSS:.0f}% or more"),
            (enlarged, f"{plural(enlarged, 'picture is', 'pictures are')} enlarged")) if count)
        return f"{some}. Look at them below, or let prep bucket --suggest find better buckets.", "warning"
    return "Run prep encode.", "good"


def _charts(document: Mapping[str, Any]) -> list[Histogram]:
    """Histograms of crop loss and scale."""
    pictures = document["pictures"]
    if not pictures:
        return []
    return [bars_of("Crop loss, in percent of the area", "percent", "pictures",
                    binned([picture["crop_loss"] for picture in pictures], CUTS, "%")),
            bars_of("Scale factor", "factor", "pictures",
                    binned([picture["scale"] for picture in pictures], SCALES, ""))]


def _buckets(document: Mapping[str, Any]) -> Table:
    counts = ("pictures", "samples", "showings", "batches")
    rows = tuple((bucket_name(bucket), *(f"{bucket[name]:,}" for name in counts),
                  "–".join(dict.fromkeys(f"{scale:.2f}" for scale in bucket["scale"])),
                  f"{bucket['crop_loss']['mean']:.1f}", f"{bucket['crop_loss']['worst']:.1f}",
                  f"{bucket['upscaled']:,}") for bucket in document["buckets"])
    heads = ("pictures", "to train", "per epoch", "micro-batches", "scale", "crop %", "worst crop %", "enlarged")
    return Table(caption="Buckets, with the scale and crop of their pictures", rows=rows, columns=(
        Column(head="bucket", kind="code"), *(Column(head=head, kind="number") for head in heads)))


def _pictures(document: Mapping[str, Any], what: str, caption: str, *, least: float) -> Table:
    """The pictures above `least`, the worst first."""
    above = (picture for picture in document["pictures"] if picture[what] > least)
    worst = sorted(above, key=lambda picture: (-picture[what], picture["name"]))
    rows = tuple((picture["name"], format_size(picture["size"]), format_size(picture["bucket"]),
                  f"{picture['crop_loss']:.1f}", f"{picture['scale']:.2f}") for picture in worst[:ROWS])
    return Table(caption=caption, rows=rows, more=max(0, len(worst) - ROWS), elsewhere=ELSEWHERE, columns=(
        Column(head="file", kind="name"), Column(head="size", kind="number"), Column(head="bucket", kind="number"),
        Column(head="crop %", kind="number"), Column(head="scale", kind="number")))


def _names(names: Sequence[str], caption: str) -> Table:
    return Table(caption=caption, columns=(Column(head="file", kind="name"),),
                 rows=tuple((name,) for name in names[:ROWS]), more=max(0, len(names) - ROWS), elsewhere=ELSEWHERE)


def _merges(document: Mapping[str, Any]) -> Table:
    rows = tuple((format_size(merge["bucket"]), format_size(merge["into"]), f"{merge['pictures']:,}",
                  f"{merge['crop_loss']['before']:.1f}", f"{merge['crop_loss']['after']:.1f}")
                 for merge in document["merges"])
    return Table(caption="Buckets with fewer pictures than min_bucket", rows=rows, columns=(
        Column(head="bucket", kind="code"), Column(head="into", kind="code"), Column(head="pictures", kind="number"),
        Column(head="crop % before", kind="number"), Column(head="crop % after", kind="number")))
