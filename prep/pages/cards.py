"""Cards of samples: the source picture if it still exists, small, the first letters of captions, and facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prep.findings import Finding
from prep.formatting import format_size
from prep.geometry import Size
from prep.images.thumbnail import encode_jpeg, encode_webp, shrink
from prep.manifest.opened import OpenedManifest
from prep.pages.originals import Originals
from prep.pages.overlay import Shot
from prep.pages.parts import Caption, Card

SIDE = 320  # pixels of a thumbnail's longer side
CAPTIONS = 3  # per card
LETTERS = 300  # per caption; prep inspect --sample shows all
Thumbnail = Callable[[Mapping[str, Any]], bytes | None]  # a described sample → PNG, JPEG or WebP of the whole picture


def source_thumbnails(opened: OpenedManifest, side: int = SIDE) -> Thumbnail:
    """Makes thumbnails from the manifest's sources; `None` for a picture that is missing or has changed."""
    originals = Originals(opened)
    encode = encode_jpeg if side >= SIDE else encode_webp

    def thumbnail(sample: Mapping[str, Any]) -> bytes | None:
        picture = originals.picture(sample, alpha="white")
        return None if picture is None else encode(shrink(picture, side))

    return thumbnail


def sample_card(shot: Shot, *, role: str, size: Size, bucket: Size, captions: Sequence[str], coverage: float | None,
                most: int = CAPTIONS, letters: int = LETTERS, facts: Sequence[str] = (),
                findings: Sequence[Finding] = (), link: str = "") -> Card:
    """Makes the card of a sample: the first `letters` of up to `most` captions; `coverage` is what trains, 0 to 1."""
    tone = min((finding.severity for finding in findings), key=("error", "warning", "info").index, default="")
    return Card(
        shot=shot, link=link, tone=tone,  # type: ignore[arg-type]  # a severity
        captions=tuple(Caption(text=caption[:letters], letters=len(caption)) for caption in captions[:most]),
        more_captions=max(0, len(captions) - most), part=coverage, findings=tuple(findings),
        facts=(role, f"{format_size(size)} to {format_size(bucket)}", *facts))


def described_card(sample: Mapping[str, Any], shot: Shot, *, most: int = CAPTIONS, letters: int = LETTERS,
                   facts: Sequence[str] = (), findings: Sequence[Finding] = ()) -> Card:
    """Makes the card of a described sample."""
    return sample_card(shot, role=sample["role"], size=sample["size"], bucket=sample["bucket"],
                       captions=[text["caption"] for text in sample["texts"]], coverage=sample["coverage"], most=most,
                       letters=letters, facts=facts, findings=findings)
