"""Writes the page of `prep inspect --html`: fields, buckets, masks, captions, a gallery of samples, findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from prep.formatting import format_bytes, format_size
from prep.fs.atomic import write_atomic
from prep.fs.paths import NamedPath
from prep.geometry import Size
from prep.manifest.describe import describe_manifest
from prep.manifest.opened import OpenedManifest
from prep.report.pages.bucket_plot import NOTE as PLOT_NOTE
from prep.report.pages.bucket_plot import Plot, bucket_shapes
from prep.report.pages.frame import Origin, Pictures, check_page_file, render_page
from prep.report.pages.gallery import Thumbnail, from_sources, gallery
from prep.report.pages.parts import Bars, Column, Head, Section, Stat, Table, bars_of, findings_table, plural

CARDS = 120  # in the gallery
FINDINGS = 500  # rows
SHAPES = 3  # per field
BINS = 10  # per histogram
STEPS = (1, 2, 5)  # times powers of ten: characters of a bin


def write_page(audit: OpenedManifest, path: Path, made: date, *, cards: int = CARDS,
               thumbnail: Thumbnail | None = None) -> None:
    """Writes the page to `path` atomically; without `thumbnail`, thumbnails come from the sources.

    Raises `CacheError` if a table of the manifest is missing or damaged.
    """
    text = page(audit, made, cards=cards, thumbnail=thumbnail or from_sources(audit))
    write_atomic(path, text.encode("utf-8"))


def check_page(audit: OpenedManifest, path: Path) -> None:
    """Raises `PathError` unless a page may be written to `path`: apart from pictures, cache and model."""
    manifest = audit.manifest
    taken = [("pictures", source) for source in manifest.sources] + [("cache", manifest.cache_root)]
    taken += [("model", manifest.model)] if isinstance(manifest.model, Path) else []
    check_page_file(path, (NamedPath(role=role, path=place) for role, place in taken
                           if place is not None and place.exists()))


def page(audit: OpenedManifest, made: date, *, cards: int, thumbnail: Thumbnail) -> str:
    """Renders the page, dated `made`."""
    document = describe_manifest(audit)
    pictures = Pictures()
    shown = gallery(audit, limit=cards, thumbnail=thumbnail, pictures=pictures)
    charts = list(_charts(audit))
    findings = findings_table(document["findings"], FINDINGS, "prep inspect --json lists every finding.")
    count = len(audit.samples)
    note = ("Outlined: the crop that training sees. Shaded red: the area that the mask excludes."
            + (f" {len(shown):,} of {count:,} samples, evenly spread; prep inspect --sample NAME shows any sample."
               if count > len(shown) else "")
            + (f" The page has no room for {plural(pictures.refused, 'picture')}." if pictures.refused else ""))
    sections = [Section(id="facts", title="Contents"),
                Section(id="buckets", title="Buckets", count=len(document["buckets"])),
                Section(id="spread", title="Sizes, masks and captions", note=PLOT_NOTE),
                Section(id="samples", title="Samples", count=len(shown), note=note),
                Section(id="findings", title="Findings", count=len(document["findings"]))]
    origin = Origin(name=audit.manifest.path.stem, places=(audit.manifest.path.name,), made=made)
    return render_page("manifest.html", origin, head=_head(document), sections=sections, facts=_facts(document),
                       fields=_fields(document), buckets=_buckets(audit, document), plot=_plot(audit), charts=charts,
                       cards=shown, findings=findings)


def _head(document: Mapping[str, Any]) -> Head:
    samples, rejected, masks = document["samples"], document["rejected"], document["masks"]
    count = sum(samples.values())
    todo = "Nothing. Run train check, then train run."
    if rejected:
        todo = f"Repair or remove the {plural(rejected, 'picture')} in Findings, then run prep encode again."
    return Head(
        kind="Manifest", what=plural(count, "sample"), tone="warning" if rejected else "good", todo=todo,
        part=count / (count + rejected) if count + rejected else None,
        usable=(f"{samples['train']:,} for training, {samples['validation']:,} for validation"
                + (f", {samples['prior']:,} for prior preservation" if samples["prior"] else "")
                + f"; {rejected:,} rejected"),
        stats=(Stat(value=f"{samples['train']:,}", label="train"),
               Stat(value=f"{samples['validation']:,}", label="validation"),
               Stat(value=f"{masks['samples']:,}", label="with a mask"),
               Stat(value=format_bytes(sum(one["bytes"] for one in document["fields"].values())), label="of rows"),
               Stat(value=f"{rejected:,}", label="rejected", tone="warning")))


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    model = document["model"].get("path") or document["model"].get("hub")
    masks = document["masks"]
    trains = "" if masks["coverage"] is None else f"; on average {masks['coverage']:.1%} of the picture trains"
    return [("model", f"{model} ({document['family']}, {document['prediction']})"),
            ("masks", f"{plural(masks['samples'], 'sample')}{trains}"),
            ("sample prompts", f"{len(document['prompts']):,}"), ("manifest", document["digest"]),
            *((f"{name} fingerprint", digest) for name, digest in document["models"].items())]


def _fields(document: Mapping[str, Any]) -> Table:
    rows = tuple((name, array, described["dtype"], " ".join(described["dims"]), _shapes(described["shapes"]),
                  f"{field['rows']:,}", f"{field['shards']:,}", format_bytes(field["bytes"]))
                 for name, field in document["fields"].items() for array, described in field["arrays"].items())
    return Table(caption="Fields and their arrays", rows=rows, columns=(
        *(Column(head=head, kind="code") for head in ("field", "array", "dtype", "dims", "shapes")),
        *(Column(head=head, kind="number") for head in ("rows", "shards", "size"))))


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Up to `SHAPES` shapes, and the number of others."""
    more = f" and {len(shapes) - SHAPES} more" if len(shapes) > SHAPES else ""
    return ", ".join("×".join(map(str, shape)) for shape in shapes[:SHAPES]) + more


def _buckets(audit: OpenedManifest, document: Mapping[str, Any]) -> Table:
    losses, (masked, covered) = _crop_losses(audit), _coverage(audit)
    rows = tuple((format_size(one["size"]), *(f"{one[role]:,}" for role in ("train", "validation", "prior")),
                  f"{loss:.1f}", f"{masks:,}", f"{100 * part:.0f}" if masks else "")
                 for one, loss, masks, part in zip(document["buckets"], losses, masked, covered, strict=True))
    heads = ("train", "validation", "prior", "crop %", "with mask", "mask trains %")
    return Table(caption="Samples by bucket; crop and mask are means", rows=rows, columns=(
        Column(head="bucket", kind="code"), *(Column(head=head, kind="number") for head in heads)))


def _crop_losses(audit: OpenedManifest) -> list[float]:
    """The mean crop loss by bucket, in percent of a scaled picture's area."""
    samples = audit.samples
    areas = np.array([width * height for width, height in audit.manifest.buckets], dtype=np.float64)
    buckets = np.repeat(samples.bucket, np.diff(samples.view_offsets))
    whole = samples.views["scaled_width"].astype(np.float64) * samples.views["scaled_height"]
    lost = 100 * (1 - areas[buckets] / whole)
    seen = np.bincount(buckets, minlength=len(areas))
    return [float(one) for one in np.bincount(buckets, weights=lost, minlength=len(areas)) / np.maximum(seen, 1)]


def _coverage(audit: OpenedManifest) -> tuple[list[int], list[float]]:
    """By bucket, the number of samples with a mask and their mean coverage."""
    samples, count = audit.samples, len(audit.manifest.buckets)
    known = ~np.isnan(samples.coverage)
    masked = np.bincount(samples.bucket[known], minlength=count)
    sums = np.bincount(samples.bucket[known], weights=samples.coverage[known], minlength=count)
    return masked.tolist(), (sums / np.maximum(masked, 1)).tolist()


def _plot(audit: OpenedManifest) -> Plot:
    samples = audit.samples
    sizes, counts = np.unique(np.stack([samples.width, samples.height], axis=1), axis=0, return_counts=True)
    pictures: dict[Size, int] = {(width, height): count for (width, height), count
                                 in zip(sizes.tolist(), counts.tolist(), strict=True)}
    inside = np.bincount(samples.bucket, minlength=len(audit.manifest.buckets)).tolist()
    return Plot(bucket_shapes(pictures, dict(zip(audit.manifest.buckets, inside, strict=True))))


def _charts(audit: OpenedManifest) -> Iterator[Bars]:
    """Histograms of mask coverage and caption length."""
    coverage = audit.samples.coverage[~np.isnan(audit.samples.coverage)]
    if len(coverage):
        counts = np.histogram(coverage, bins=BINS, range=(0, 1))[0].tolist()
        names = [f"{100 * number // BINS}–{100 * (number + 1) // BINS}%" for number in range(BINS)]
        yield bars_of("Masks: fraction of the picture that trains", "fraction", "samples",
                      zip(names, counts, strict=True),
                      f"{plural(len(audit.samples) - len(coverage), 'sample')} without a mask: all of each trains.")
    lengths = audit.samples.caption_lengths
    if len(lengths):
        low, middle, high = (int(one) for one in np.percentile(lengths, (0, 50, 100), method="nearest"))
        yield bars_of("Captions: length in characters", "characters", "captions", _length_bins(lengths),
                      f"Shortest {low:,}, median {middle:,}, longest {high:,}.")


def _length_bins(lengths: np.ndarray[Any, Any]) -> Iterator[tuple[str, int]]:
    """Counts in at most `BINS` bins of a round width, from 0 to the longest caption."""
    most = int(lengths.max()) + 1
    width = next(step * 10**power for power in range(20) for step in STEPS if step * 10**power * BINS >= most)
    counts = np.bincount(lengths // width).tolist()
    for number, count in enumerate(counts):
        yield (f"{number * width:,}–{(number + 1) * width - 1:,}" if width > 1 else f"{number:,}"), count
