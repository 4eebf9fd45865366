"""Each page of the tool, made of given texts: names, captions and details of findings."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from small_manifest import write_small

from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.dataset.preview import TrainSample, preview_epoch
from prep.findings import finding
from prep.fs.blob import Blob
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.manifest.statistics import Outlier, latent_statistics
from prep.masks.run import MaskEntry
from prep.pages.snapshot import PageOrigin
from prep.report.snapshots.buckets import bucket_page
from prep.report.snapshots.gallery import Decoded
from prep.report.snapshots.manifest import CaptionTokens, Measurements
from prep.report.snapshots.manifest import page as manifest_page
from prep.report.snapshots.masks import write_sheets
from prep.report.snapshots.scan import preview_names, scan_page
from prep.scan.scanner import ScanReport
from prep.sources.item import Item

TEXTS = 7  # that each page wants
MADE = date(2024, 2, 29)
SIZES = ((320, 213), (213, 320), (320, 320), (320, 96), (64, 320), (9, 9))
CODES = ("truncated", "blank", "has-alpha", "missing-caption", "mirrored-duplicate")
VOID = {"meta", "link", "img", "input", "br", "wbr"}
WORDED = {"alt", "aria-label"}  # attributes with words of files


def origin(texts: Sequence[str]) -> PageOrigin:
    """A data set with such a name in such places."""
    return PageOrigin(name=texts[0], places=tuple(texts[:2]), made=MADE)


def jpeg(number: int) -> bytes:
    """A picture of smooth colors; their sizes take turns."""
    coarse = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(coarse).resize(SIZES[number % len(SIZES)], Image.Resampling.BICUBIC).save(stream, "JPEG")
    return stream.getvalue()


def scan_html(texts: Sequence[str], *, repeats: int = 1) -> str:
    """Findings of every severity about each text, `repeats` times, and duplicates of each."""
    names = [f"{text}{number or ''}" for number in range(repeats) for text in texts]
    found = [finding(name, code, f"saw {name}") for name in names for code in CODES]
    found += [finding(name, "near-duplicate", f"like {names[0]}", other=names[0], likeness=0.987) for name in names[1:]]
    report = ScanReport(pictures=len(names), samples=len(names), findings=tuple(sorted(
        found, key=lambda one: (one.path, one.code))))
    previews = {name: jpeg(number) for number, name in enumerate(preview_names(report.findings)) if number % 5 != 4}
    return scan_page(origin(texts), report, previews)


def bucket_html(texts: Sequence[str]) -> str:
    """Pictures of many sizes; some are cut, enlarged, merged, left out, repeated or refused."""
    sizes = [(512, 512), (640, 512), (300, 200), (1400, 500), (480, 1900), (2000, 2000), (20, 20)]
    placed = assign_buckets([(name, sizes[number % len(sizes)]) for number, name in enumerate(texts)],
                            Rules(resolution=512, upscale="allow"))
    samples = [TrainSample(id=f"{one.index:04}", name=one.name, bucket=one.placement.bucket, repeats=1)
               for one in placed.pictures]
    rejected = [finding(texts[0], "truncated", texts[1], as_error=True)]
    return bucket_page(preview_epoch(placed, samples, batch_size=4), origin(texts), rejected)


def mask_html(texts: Sequence[str], root: Path) -> str:
    """Pictures with masks, without them, and one that cannot be read."""
    root.mkdir(exist_ok=True)
    (root / "none.jpg").write_bytes(b"no picture")
    entries = []
    for number, name in enumerate(texts):
        picture, mask = root / f"{number}.jpg", root / f"{number}-mask.png"
        picture.write_bytes(jpeg(number))
        if number % 3:
            Image.linear_gradient("L").resize(SIZES[number % len(SIZES)]).save(mask)
        blob = Blob(file=str(root / "none.jpg" if number == 3 else picture))
        item = Item(name=name, source=0, label="", picture=blob, caption_at=None, mask=None)
        entries.append(MaskEntry(item=item, name=name, mask=mask))
    (page,) = write_sheets(root / "masks.html", origin(texts), entries, jobs=1, tick=lambda _: None)
    return page.read_text()


def manifest_html(texts: Sequence[str], root: Path) -> str:
    """Three samples with their pictures, one of them with references, and captions of one length."""
    captions = [text[:200].ljust(200, ".") for text in texts[3:6]]
    references = {f"{number}{text}": jpeg(number) for number, text in enumerate(texts)}
    opened = open_manifest(read_manifest(write_small(root, [*texts[:3], *captions, texts[6]], references=references)))
    measured = Measurements(latents=latent_statistics(opened, lambda _: None),
                            decoded={1: Decoded(picture=jpeg(3), psnr=12.3)},
                            tokens=CaptionTokens(encoder="CLIP", limit=75, counts=(3, 60, 99), samples=3),
                            outliers=[Outlier(sample=number, channel=0, what="mean", value=1.0, usual=0.1, score=9.0)
                                      for number in range(3)])

    def thumbnail(sample: Mapping[str, Any], reference: Mapping[str, Any] | None = None, /) -> bytes | None:
        if reference is None:
            return jpeg(sample["name"] == texts[1])
        return None if reference["name"] == f"1{texts[1]}" else references[reference["name"]]

    return manifest_page(opened, MADE, cards=10, thumbnail=thumbnail, measured=measured)


@dataclass
class Outline(HTMLParser):
    """What a page is made of: how often each element comes with which attributes, and its text."""

    source: str
    elements: Counter[str] = field(default_factory=Counter)
    words: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.source)
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self._open.append(tag)
        if tag != "wbr":
            kept = [(name, None if name in WORDED or (value and value.startswith("data:image/")) else value)
                    for name, value in attrs]
            self.elements[f"{tag} {kept}"] += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[f"{tag} {attrs}"] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.words += data
