"""Cards of samples: the source picture if it still exists, small, the first letters of captions, and facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from prep.findings import Finding
from prep.formatting import format_bucket, format_size
from prep.geometry import Size
from prep.images.thumbnail import encode_jpeg, encode_webp, shrink
from prep.manifest.opened import OpenedManifest
from prep.pages.originals import Originals
from prep.pages.overlay import Shot, crop_overlay
from prep.pages.parts import Caption, Card, CardReference

SIDE = 320  # pixels of a thumbnail's longer side
CAPTIONS = 3  # per card
LETTERS = 300  # per caption; prep inspect --sample shows all
REFERENCES = 4  # per card


class Thumbnail(Protocol):
    """Makes a PNG, JPEG or WebP of the whole picture of a described sample, or of a described reference of it."""

    def __call__(self, sample: Mapping[str, Any], reference: Mapping[str, Any] | None = None, /) -> bytes | None: ...


def source_thumbnails(opened: OpenedManifest, side: int = SIDE) -> Thumbnail:
    """Makes thumbnails from the manifest's sources; `None` for a picture that is missing or has changed."""
    originals = Originals(opened)
    encode = encode_jpeg if side >= SIDE else encode_webp

    def thumbnail(sample: Mapping[str, Any], reference: Mapping[str, Any] | None = None, /) -> bytes | None:
        picture = originals.picture(sample, reference=reference, alpha="white")
        return None if picture is None else encode(shrink(picture, side))

    return thumbnail


def references_of(sample: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The references of a described sample, in order: those of its first view; others have the same files."""
    references: Sequence[Mapping[str, Any]] = sample["views"][0].get("references", ())
    return references


def described_bucket(sample: Mapping[str, Any]) -> str:
    """The shape of a described sample's bucket, with its references: 512x512+384x384."""
    return format_bucket((sample["bucket"], [each["bucket"] for each in references_of(sample)]))


def described_references(sample: Mapping[str, Any], addresses: Sequence[str], *, paired: bool,
                         cropped: bool = True) -> tuple[CardReference, ...]:
    """The first references of a described sample, by the addresses of their pictures, "" for one without; `cropped`:
    with their crops; `paired`: each is the other picture of a pair."""
    what = "the other of its pair, " if paired else ""
    return tuple(CardReference(
        number=number, fact=f"{what}{format_size(each['size'])} to {format_size(each['bucket'])}",
        shot=Shot(name=each["name"], address=address, instead="not here", lazy=not cropped,
                  size=tuple(each["size"]) if cropped else None,
                  overlays=(crop_overlay(each, each["bucket"], ""),) if cropped else ()))
        for number, (each, address) in enumerate(zip(references_of(sample), addresses, strict=False), 1))


def more_references(sample: Mapping[str, Any], shown: int) -> tuple[str, ...]:
    """The fact on a card that shows only the first references, or none."""
    count = len(references_of(sample))
    return (f"{count} references, {shown} shown",) if count > shown else ()


def sample_card(shot: Shot, *, role: str, size: Size, bucket: Size, captions: Sequence[str], coverage: float | None,
                most: int = CAPTIONS, letters: int = LETTERS, facts: Sequence[str] = (),
                findings: Sequence[Finding] = (), link: str = "",
                references: Sequence[CardReference] = ()) -> Card:
    """Makes the card of a sample: the first `letters` of up to `most` captions; `coverage` is what trains, 0 to 1."""
    tone = min((finding.severity for finding in findings), key=("error", "warning", "info").index, default="")
    return Card(
        shot=shot, link=link, tone=tone,  # type: ignore[arg-type]  # a severity
        captions=tuple(Caption(text=caption[:letters], letters=len(caption)) for caption in captions[:most]),
        more_captions=max(0, len(captions) - most), part=coverage, findings=tuple(findings),
        references=tuple(references),
        facts=(role, f"{format_size(size)} to {format_size(bucket)}", *facts))


def described_card(sample: Mapping[str, Any], shot: Shot, *, most: int = CAPTIONS, letters: int = LETTERS,
                   facts: Sequence[str] = (), findings: Sequence[Finding] = (),
                   references: Sequence[CardReference] = ()) -> Card:
    """Makes the card of a described sample."""
    return sample_card(shot, role=sample["role"], size=sample["size"], bucket=sample["bucket"],
                       captions=[text["caption"] for text in sample["texts"]], coverage=sample["coverage"], most=most,
                       letters=letters, facts=facts, findings=findings, references=references)
