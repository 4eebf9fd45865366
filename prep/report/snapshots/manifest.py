"""Writes the page of `prep inspect --html`: fields, buckets, masks, captions, a gallery of samples, findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from prep.findings import Finding
from prep.formatting import bucket_name, format_bytes
from prep.fs.atomic import write_atomic
from prep.fs.paths import NamedPath
from prep.fs.place import Place, is_here
from prep.geometry import Size
from prep.manifest.describe import describe_manifest
from prep.manifest.opened import OpenedManifest
from prep.manifest.statistics import LatentStatistics, Outlier
from prep.pages.bucket_plot import NOTE as PLOT_NOTE
from prep.pages.bucket_plot import Plot, bucket_shapes
from prep.pages.cards import Thumbnail
from prep.pages.facts import manifest_facts
from prep.pages.finder import EXAMPLE
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
from prep.progress import Tick
from prep.report.snapshots.gallery import GROUPS, ORDERS, About, Decoded, Gallery, gallery, spread
from prep.report.snapshots.latents import channels_table, latents_note, outliers_table

CARDS = 10_000  # in the gallery
FINDINGS = 500  # rows
SHAPES = 3  # per field
BINS = 10  # per histogram
LIMIT_BINS = 5  # up to the tokens that are read
STEPS = (1, 2, 5)  # times powers of ten: characters of a bin


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionTokens:
    """The lengths of the captions of all samples, or of some, evenly spread."""

    encoder: str
    limit: int  # tokens that it reads
    counts: Sequence[int]
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """Measurements of captions and latents for a page, beyond a manifest and its tables."""

    latents: LatentStatistics | None = None
    outliers: Sequence[Outlier] = ()
    tokens: CaptionTokens | None = None
    decoded: Mapping[int, Decoded] = field(default_factory=dict)  # by the sample's number
    decoded_note: str = ""


def write_page(audit: OpenedManifest, path: Path, made: date, *, cards: int = CARDS, thumbnail: Thumbnail | None = None,
               measured: Measurements | None = None, tick: Tick = lambda _: None) -> None:
    """Writes the page to `path` atomically; without `thumbnail`, thumbnails come from the sources.

    Ticks once for each card. Raises `CacheError` if a table of the manifest is missing or damaged.
    """
    text = page(audit, made, cards=cards, thumbnail=thumbnail, measured=measured, tick=tick)
    write_atomic(path, text.encode("utf-8"))


def check_page(audit: OpenedManifest, path: Path) -> None:
    """Raises `PathError` unless a page may be written to `path`: apart from pictures, cache and model."""
    manifest = audit.manifest
    taken: list[tuple[str, Place | None]] = [("pictures", source) for source in manifest.sources]
    taken += [("cache", manifest.cache)]
    taken += [] if isinstance(manifest.model, str) else [("model", manifest.model)]
    check_page_file(path, (NamedPath(role=role, path=place) for role, place in taken
                           if place is not None and is_here(place)))


def page(audit: OpenedManifest, made: date, *, cards: int, thumbnail: Thumbnail | None,
         measured: Measurements | None = None, tick: Tick = lambda _: None) -> str:
    """Renders the page, dated `made`."""
    document, extra = describe_manifest(audit), measured or Measurements()
    scores = {outlier.sample: abs(outlier.score) for outlier in extra.outliers}
    chosen = sorted({*spread(len(audit.samples), cards), *extra.decoded})
    about = About(scores=scores, decoded=extra.decoded, findings=_by_label(document["findings"]))
    shown = gallery(audit, chosen, about, thumbnail=thumbnail, tick=tick)
    charts = list(_charts(audit, extra.tokens))
    findings = findings_table(document["findings"], FINDINGS, "prep inspect --json lists every finding.")
    channels = None if extra.latents is None else channels_table(extra.latents)
    sections = [Section(id="facts", title="Contents"),
                Section(id="findings", title="Findings", count=len(document["findings"])),
                Section(id="buckets", title="Buckets", count=len(document["buckets"])),
                Section(id="spread", title="Sizes, masks and captions", note=PLOT_NOTE),
                *([Section(id="latents", title="Latents", note=latents_note(
                    audit, extra.latents, len(extra.outliers)))]
                  if measured is not None else []),
                Section(id="samples", title="Samples", count=len(shown.entries), note=_note(audit, shown, extra))]
    origin = PageOrigin(name=audit.manifest.path.stem, places=(audit.manifest.path.name,), made=made)
    return render_snapshot(
        "manifest.html", origin, head=_head(document), sections=sections,
        facts=[_masks(document), *manifest_facts(audit)], fields=_fields(document),
        buckets=_buckets(audit, document), plot=_plot(audit), charts=charts, cards=shown.cards, findings=findings,
        channels=channels, groups=GROUPS, orders=ORDERS,
        unusual=outliers_table(audit, extra.outliers) if extra.outliers else None,
        example=EXAMPLE, data=shown.data)


def _by_label(findings: Sequence[Mapping[str, Any]]) -> dict[str, list[Finding]]:
    by_label: dict[str, list[Finding]] = {}
    for finding in findings:
        by_label.setdefault(finding["path"], []).append(Finding(**finding))
    return by_label


def _note(audit: OpenedManifest, shown: Gallery, extra: Measurements) -> str:
    """A note on what the cards show and leave out."""
    count = len(audit.samples)
    parts = ["Outlined: the crop that training sees. Shaded red: the area that the mask excludes."]
    if count > len(shown.entries):
        parts.append(f"{len(shown.entries):,} of {count:,} samples, evenly spread; prep inspect --sample NAME shows "
                     "any sample.")
    if len(shown.entries) > len(shown.cards):
        parts.append(f"Without scripts, {len(shown.cards):,} of them are shown.")
    if shown.refused:
        parts.append(f"The page has no room for {plural(shown.refused, 'picture')}.")
    return " ".join([*parts, extra.decoded_note]).strip()


def _head(document: Mapping[str, Any]) -> Head:
    samples, rejected, masks = document["samples"], document["rejected"], document["masks"]
    count = sum(samples.values())
    todo = "Run train check, then train run."
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
               Stat(value=format_bytes(sum(field["bytes"] for field in document["fields"].values())), label="of rows"),
               Stat(value=f"{rejected:,}", label="rejected", tone="warning")))


def _masks(document: Mapping[str, Any]) -> tuple[str, str]:
    masks = document["masks"]
    trains = "" if masks["coverage"] is None else f"; on average {masks['coverage']:.1%} of the picture trains"
    return "masks", f"{plural(masks['samples'], 'sample')}{trains}"


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
    (losses, worst), (masked, covered) = _crop_losses(audit), _coverage(audit)
    rows = tuple((bucket_name(bucket), *(f"{bucket[role]:,}" for role in ("train", "validation", "prior")),
                  f"{loss:.1f}", f"{most:.1f}", f"{masks:,}", f"{100 * part:.0f}" if masks else "")
                 for bucket, loss, most, masks, part in zip(document["buckets"], losses, worst, masked, covered,
                                                         strict=True))
    heads = ("train", "validation", "prior", "crop %", "worst crop %", "with mask", "mask trains %")
    return Table(caption="Samples by bucket; crop and mask are means", rows=rows, columns=(
        Column(head="bucket", kind="code"), *(Column(head=head, kind="number") for head in heads)))


def _losses(audit: OpenedManifest) -> np.ndarray[Any, Any]:
    """The crop loss of each view, in percent of the scaled picture's area."""
    samples = audit.samples
    areas = np.array([width * height for width, height in audit.manifest.buckets], dtype=np.float64)
    whole = samples.views["scaled_width"].astype(np.float64) * samples.views["scaled_height"]
    lost: np.ndarray[Any, Any] = 100 * (1 - areas[_view_buckets(audit)] / whole)
    return lost


def _view_buckets(audit: OpenedManifest) -> np.ndarray[Any, Any]:
    buckets: np.ndarray[Any, Any] = np.repeat(audit.samples.bucket, np.diff(audit.samples.view_offsets))
    return buckets


def _crop_losses(audit: OpenedManifest) -> tuple[list[float], list[float]]:
    """The mean and the largest crop loss by bucket, in percent."""
    buckets, lost, count = _view_buckets(audit), _losses(audit), len(audit.manifest.buckets)
    means = np.bincount(buckets, weights=lost, minlength=count) / np.maximum(np.bincount(buckets, minlength=count), 1)
    worst = np.zeros(count)
    np.maximum.at(worst, buckets, lost)
    return means.tolist(), worst.tolist()


def _coverage(audit: OpenedManifest) -> tuple[list[int], list[float]]:
    """The number of samples with a mask, and their mean coverage, by bucket."""
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
    inside: Counter[Size] = Counter()
    for size, count in zip(audit.manifest.buckets,
                           np.bincount(samples.bucket, minlength=len(audit.manifest.buckets)).tolist(), strict=True):
        inside[size] += count  # one size may have several buckets, with other references
    return Plot(bucket_shapes(pictures, inside))


def _charts(audit: OpenedManifest, tokens: CaptionTokens | None) -> Iterator[Histogram]:
    """Histograms of crop loss, mask coverage and caption length."""
    yield bars_of("Crops: loss in percent of the scaled picture", "percent", "crops",
                  binned(np.round(_losses(audit), 3).tolist(), CUTS, "%"))
    coverage = audit.samples.coverage[~np.isnan(audit.samples.coverage)]
    if len(coverage):
        counts = np.histogram(coverage, bins=BINS, range=(0, 1))[0].tolist()
        names = [f"{100 * number // BINS}–{100 * (number + 1) // BINS}%" for number in range(BINS)]
        yield bars_of("Masks: fraction of the picture that trains", "fraction", "samples",
                      zip(names, counts, strict=True),
                      f"{plural(len(audit.samples) - len(coverage), 'sample')} without a mask: all of each trains.")
    yield from _lengths(audit, tokens)


def _lengths(audit: OpenedManifest, tokens: CaptionTokens | None) -> Iterator[Histogram]:
    """Histograms of the captions' lengths: in tokens against what is read of them, and in characters."""
    letters = audit.samples.caption_lengths
    if tokens is not None and tokens.counts:
        counts = np.array(tokens.counts)
        low, middle, high = (int(length) for length in np.percentile(counts, (0, 50, 100), method="nearest"))
        longer = int((counts > tokens.limit).sum())
        width = max(1, -(-tokens.limit // LIMIT_BINS))
        bins = max(1, -(-tokens.limit // width))
        names = [*(f"{number * width + bool(number)}–{min((number + 1) * width, tokens.limit)}"
                   for number in range(bins)), *(["more"] if longer else [])]
        places = np.where(counts > tokens.limit, bins, np.maximum(-(-counts // width) - 1, 0))
        bars = np.bincount(places, minlength=len(names)).tolist()
        yield bars_of(f"Captions: length in tokens of {tokens.encoder}", "tokens", "captions",
                      zip(names, bars, strict=True), over=bins if longer else None, note=(
                          f"{tokens.encoder} reads {tokens.limit:,} tokens of a caption; "
                          + (f"{plural(longer, 'caption is', 'captions are')} longer" if longer else "none is longer")
                          + f". Shortest {low:,}, median {middle:,}, longest {high:,}."
                          + (f" Of {tokens.samples:,} of {len(audit.samples):,} samples, evenly spread."
                             if tokens.samples < len(audit.samples) else "")))
    if len(letters):
        low, middle, high = (int(length) for length in np.percentile(letters, (0, 50, 100), method="nearest"))
        yield bars_of("Captions: length in characters", "characters", "captions", _length_bins(letters),
                      f"Shortest {low:,}, median {middle:,}, longest {high:,}.")


def _length_bins(lengths: np.ndarray[Any, Any]) -> Iterator[tuple[str, int]]:
    """Counts in at most `BINS` bins of a round width, from 0 to the longest caption."""
    most = int(lengths.max()) + 1
    width = next(step * 10**power for power in range(20) for step in STEPS if step * 10**power * BINS >= most)
    counts = np.bincount(lengths // width).tolist()
    for number, count in enumerate(counts):
        yield (f"{number * width:,}–{(number + 1) * width - 1:,}" if width > 1 else f"{number:,}"), count
