"""Makes the cards of samples: the source picture if it still exists, the crop, the mask as a shade, and captions.

A gallery of many samples has smaller pictures, so that its page stays below 15 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from prep.cache.reader import Reader
from prep.cache.values import read_values
from prep.findings import Finding
from prep.formatting import format_size
from prep.fs.labels import labels_of
from prep.images.mask import mask_picture
from prep.images.thumbnail import encode_shade, small_shade
from prep.manifest.describe import describe
from prep.manifest.opened import OpenedManifest
from prep.pages.cards import (
    CAPTIONS,
    LETTERS,
    REFERENCES,
    SIDE,
    Thumbnail,
    described_bucket,
    described_card,
    described_references,
    more_references,
    references_of,
    source_thumbnails,
)
from prep.pages.finder import CardOrder, FoundCard, cards_json
from prep.pages.overlay import Shot, crop_overlay
from prep.pages.parts import Card
from prep.pages.snapshot import EmbeddedPictures
from prep.progress import Tick
from prep.runtime import usable_cores

FEW = 120  # cards with pictures of that size, and in the page's HTML; others are data for its script
LETTERS_OF_MANY = 120
VIEWS = 8  # per card
MOST_TEXT = 14 << 20  # bytes of a page, pictures included
OTHER_TEXT = 1 << 20  # bytes of a page besides its cards: tables of at most 500 findings, the plot, style and script
SHADE, SHADE_BYTES = 24, 110  # pixels of the longer side of a mask of many, and what such a WebP takes
# Bytes of a photo by the side of its WebP: means of 63 photos; of drawings fewer.
SIDES = ((256, 4800), (192, 3100), (160, 2300), (128, 1600), (112, 1310), (96, 1030), (80, 790), (72, 700), (64, 580),
         (48, 400))

GROUPS = ("Role", "Bucket", "Mask", "Findings")
ORDERS = (CardOrder(title="name", descending=False, by_name=True),
          CardOrder(title="largest crop loss", descending=True),
          CardOrder(title="least of the mask trains", descending=False),
          CardOrder(title="longest caption", descending=True),
          CardOrder(title="most unusual latent", descending=True),
          CardOrder(title="lowest PSNR", descending=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """A sample's latent, decoded."""

    picture: bytes  # JPEG, PNG or WebP
    psnr: float | None  # dB, against the crop that was encoded; infinite if they are equal; None: it was not found


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """The facts of samples beside the manifest's rows, by the samples' numbers."""

    scores: Mapping[int, float] = field(default_factory=dict)  # how far their latents are from the usual
    decoded: Mapping[int, Decoded] = field(default_factory=dict)
    findings: Mapping[str, Sequence[Finding]] = field(default_factory=dict)  # by label


@dataclass(frozen=True, kw_only=True, slots=True)
class Gallery:
    """Cards, the worst PSNR first, and what its page needs to know of them."""

    entries: tuple[FoundCard, ...]
    refused: int  # pictures without room

    @property
    def cards(self) -> list[Card]:
        """The cards in the page's HTML."""
        return [entry.card for entry in self.entries[:FEW]]

    @property
    def data(self) -> str:
        """All cards, as data for the page's script."""
        return cards_json(self.entries, ORDERS, fixed=FEW)


def spread(count: int, limit: int) -> list[int]:
    """Up to `limit` of so many numbers, evenly spread."""
    return sorted({count * number // limit for number in range(min(limit, count))}) if count > limit else [
        *range(count)]


def gallery(audit: OpenedManifest, chosen: Sequence[int], about: About, *, thumbnail: Thumbnail | None,
            tick: Tick = lambda _: None) -> Gallery:
    """Makes a card for each of the samples `chosen`; without `thumbnail`, pictures come from the sources."""
    ordered = sorted(chosen, key=lambda number: (_rank(about.decoded.get(number)), number))
    samples = [(number, describe(audit, number)) for number in ordered]
    entries = [_found(audit, number, sample, about, many=len(samples) > FEW) for number, sample in samples]
    text = len(cards_json(entries, ORDERS, fixed=FEW).encode())
    if text > MOST_TEXT - OTHER_TEXT:  # very long names and findings; those that are decoded stay
        fewer = {ordered[place] for place in spread(len(ordered), len(ordered) // 2)} | set(about.decoded)
        return gallery(audit, sorted(fewer), about, thumbnail=thumbnail, tick=tick)
    pictures = EmbeddedPictures(None if len(samples) <= FEW else max(0, MOST_TEXT - OTHER_TEXT - text))
    referred = sum(len(_references_on(sample)) for _, sample in samples)
    made = thumbnail or source_thumbnails(audit, _side(len(samples), pictures.room, referred))
    whole = [(entry, sample, smalls) for entry, (_, sample), smalls in zip(
        entries, samples, _thumbnails([sample for _, sample in samples], made), strict=True) if not tick(1)]
    reader = Reader(audit.cache)
    cards = tuple(_with_pictures(entry, sample, smalls, reader, about.decoded.get(number), pictures, len(samples) > FEW)
                  for (entry, sample, smalls), number in zip(whole, ordered, strict=True))
    reader.close()
    return Gallery(entries=cards, refused=pictures.refused)


def _references_on(sample: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The references of a sample that its card shows."""
    return references_of(sample)[:REFERENCES]


def _side(count: int, room: int, referred: int = 0) -> int:
    """The side at which the thumbnails of `count` samples, and of `referred` references, fit into `room` bytes in
    base64, with masks."""
    each = (room * 3 // 4 - count * SHADE_BYTES) // max(count + referred, 1)
    return SIDE if count <= FEW else next((side for side, size in SIDES if size <= each), SIDES[-1][0])


def _thumbnails(samples: Sequence[Mapping[str, Any]], thumbnail: Thumbnail) -> Iterator[list[bytes | None]]:
    """The thumbnails of each sample in turn, a few ahead: its own, then those of its references on its card."""
    def small(sample: Mapping[str, Any]) -> list[bytes | None]:
        return [thumbnail(sample), *(thumbnail(sample, each) for each in _references_on(sample))]

    rest = iter(samples)
    with ThreadPoolExecutor(usable_cores()) as pool:
        ahead = [pool.submit(small, sample) for sample in islice(rest, 64)]
        while ahead:
            yield ahead.pop(0).result()
            ahead += [pool.submit(small, sample) for sample in islice(rest, 1)]


def _found(audit: OpenedManifest, number: int, sample: Mapping[str, Any], about: About, *, many: bool) -> FoundCard:
    """The card of a sample without its pictures, and the values by which it is found."""
    labels = labels_of(sample["source"], sample["name"], audit.prefixes)
    findings = tuple(finding for label in labels for finding in about.findings.get(label, ()))
    if many:
        findings = tuple(replace(finding, detail=finding.detail[:LETTERS_OF_MANY])
                         for finding in findings[:CAPTIONS])
    decoded, score = about.decoded.get(number), about.scores.get(number)
    views, coverage = sample["views"], sample["coverage"]
    losses = [1 - sample["bucket"][0] * sample["bucket"][1] / (view["scaled"][0] * view["scaled"][1]) for view in views]
    letters = max((len(text["caption"]) for text in sample["texts"]), default=0)
    more = () if decoded is None or decoded.psnr is None else (f"PSNR {decoded.psnr:.1f} dB",)
    shot = Shot(name=sample["name"], address="", size=sample["size"],
                instead=f"{format_size(sample['size'])}: the original picture was not found")
    card = described_card(sample, shot, most=1 if many else CAPTIONS, letters=LETTERS_OF_MANY if many else LETTERS,
                          facts=more, findings=findings,
                          references=described_references(sample, [""] * len(_references_on(sample)),
                                                          paired=audit.manifest.paired))
    return FoundCard(
        card=card, groups=(sample["role"], described_bucket(sample), "none" if coverage is None else "a mask",
                           ", ".join(sorted({finding.code for finding in findings})) or "none"),
        values=(None, 100 * max(losses, default=0.0), coverage, letters, score,
                None if decoded is None or decoded.psnr is None else min(decoded.psnr, 1e6)))


def _rank(decoded: Decoded | None) -> tuple[int, float]:
    """Decoded samples come first, the lowest PSNR before all."""
    if decoded is None:
        return 2, 0.0
    return (1, 0.0) if decoded.psnr is None else (0, decoded.psnr)


def _with_pictures(entry: FoundCard, sample: Mapping[str, Any], smalls: Sequence[bytes | None], reader: Reader,
                   decoded: Decoded | None, pictures: EmbeddedPictures, many: bool) -> FoundCard:
    """The card with its pictures, as far as the page has room."""
    views = sample["views"][: 1 if many else VIEWS]
    address, *referred = map(pictures.add, smalls)
    overlays = tuple(crop_overlay(view, sample["bucket"], pictures.add(_mask(
        reader, view["mask"], SHADE if many else None))) for view in views)
    count = len(sample["views"])
    more = (*((f"{count:,} views, {len(overlays)} shown",) if count > len(overlays) else ()),
            *more_references(sample, REFERENCES))
    card, shot = entry.card, entry.card.shot
    beside = None if decoded is None else Shot(
        name=f"{shot.name}, its latent decoded", address=pictures.add(decoded.picture), instead="no room")
    references = tuple(replace(each, shot=replace(each.shot, address=address))
                       for each, address in zip(card.references, referred, strict=True))
    return replace(entry, card=replace(card, shot=replace(shot, address=address, overlays=overlays), beside=beside,
                                       references=references, facts=(*card.facts, *more)))


def _mask(reader: Reader, place: Mapping[str, Any] | None, side: int | None) -> bytes | None:
    """A shade for a mask; `None` if there is none, or it cannot be read."""
    values = read_values(reader, place, "mask")
    if values is None:
        return None
    mask_HW = mask_picture(values)
    return encode_shade(mask_HW) if side is None else small_shade(mask_HW, side)
