"""`prep inspect --html`: one page that needs nothing else: no script, no font, no address, light and dark.

Every name, caption and detail is escaped, and the page's own policy forbids scripts and loading anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prep.formatting import format_bytes, format_size
from prep.fs.atomic import write_atomic
from prep.fs.paths import NamedPath
from prep.geometry import Size
from prep.manifest.describe import describe_manifest
from prep.manifest.opened import OpenedManifest
from prep.report.pages.bucket_plot import bucket_plot
from prep.report.pages.frame import check_page_file, render_page, table
from prep.report.pages.frame import sections as as_sections
from prep.report.pages.gallery import Thumbnail, from_sources, gallery

CARDS = 120  # in the gallery
FINDINGS = 500  # rows; `prep inspect --json` has them all


def write_page(audit: OpenedManifest, path: Path, *, cards: int = CARDS, thumbnail: Thumbnail | None = None) -> None:
    """Writes the page to `path`, whole or not at all; thumbnails are the sources' own unless given.

    Raises `CacheError` when a table of the manifest is missing or damaged.
    """
    text = page(audit, cards=cards, thumbnail=thumbnail or from_sources(audit))
    write_atomic(path, text.encode("utf-8"))


def check_page(audit: OpenedManifest, path: Path) -> None:
    """Raises `PathError` unless a page may be written to `path`: apart from pictures, cache and model."""
    manifest = audit.manifest
    taken = [("pictures", source) for source in manifest.sources] + [("cache", manifest.cache_root)]
    taken += [("model", manifest.model)] if isinstance(manifest.model, Path) else []
    check_page_file(path, (NamedPath(role=role, path=place) for role, place in taken
                           if place is not None and place.exists()))


def page(audit: OpenedManifest, *, cards: int, thumbnail: Thumbnail) -> str:
    """The page: what the manifest holds, sizes against buckets, a gallery, findings."""
    document = describe_manifest(audit)
    sections = [
        ("Fields", _fields(document)),
        ("Buckets", f"{_buckets(audit, document)}\n{_plot(audit)}"),
        ("Samples", gallery(audit, limit=cards, thumbnail=thumbnail)),
        ("Findings", _findings(document["findings"])),
    ]
    return render_page(document["manifest"], f"{_facts(document)}\n{as_sections(sections)}")


def _facts(document: Mapping[str, Any]) -> str:
    model = document["model"].get("path") or document["model"].get("hub")
    counts = ", ".join(f"{count} {role}" for role, count in document["samples"].items())
    prints = [(f"{name} fingerprint", digest) for name, digest in document["models"].items()]
    what = f"{model} ({document['family']}, {document['prediction']})"
    return table(("", ""), [("samples", counts), ("model", what), *prints, ("manifest", document["digest"])])


def _fields(document: Mapping[str, Any]) -> str:
    rows = [(name, array, described["dtype"], " ".join(described["dims"]),
             ", ".join(str(shape) for shape in described["shapes"]), str(field["rows"]), str(field["shards"]),
             format_bytes(field["bytes"]))
            for name, field in document["fields"].items() for array, described in field["arrays"].items()]
    return table(("field", "array", "dtype", "dims", "shapes", "rows", "shards", "size"), rows, numbers=(5, 6, 7))


def _buckets(audit: OpenedManifest, document: Mapping[str, Any]) -> str:
    losses = _crop_losses(audit)
    rows = [(format_size(one["size"]), *(str(one[role]) for role in ("train", "validation", "prior")), f"{loss:.1f} %")
            for one, loss in zip(document["buckets"], losses, strict=True)]
    return table(("bucket", "train", "validation", "prior", "cut on average"), rows, numbers=(1, 2, 3, 4))


def _crop_losses(audit: OpenedManifest) -> list[float]:
    """Mean percent of a scaled picture's area that its views leave out, by bucket."""
    samples = audit.samples
    areas = np.array([width * height for width, height in audit.manifest.buckets], dtype=np.float64)
    buckets = np.repeat(samples.bucket, np.diff(samples.view_offsets))
    whole = samples.views["scaled_width"].astype(np.float64) * samples.views["scaled_height"]
    lost = 100 * (1 - areas[buckets] / whole)
    seen = np.bincount(buckets, minlength=len(areas))
    return [float(one) for one in np.bincount(buckets, weights=lost, minlength=len(areas)) / np.maximum(seen, 1)]


def _plot(audit: OpenedManifest) -> str:
    samples = audit.samples
    sizes, counts = np.unique(np.stack([samples.width, samples.height], axis=1), axis=0, return_counts=True)
    pictures: dict[Size, int] = {(width, height): count for (width, height), count
                                 in zip(sizes.tolist(), counts.tolist(), strict=True)}
    inside = np.bincount(samples.bucket, minlength=len(audit.manifest.buckets)).tolist()
    return bucket_plot(pictures, dict(zip(audit.manifest.buckets, inside, strict=True)))


def _findings(findings: Sequence[Mapping[str, str]]) -> str:
    if not findings:
        return "<p>none</p>"
    more = f"<p>and {len(findings) - FINDINGS} more</p>" if len(findings) > FINDINGS else ""
    rows = [(one["severity"], one["code"], one["path"], one["detail"]) for one in findings[:FINDINGS]]
    return table(("severity", "code", "file", "what"), rows) + more
