"""Makes the cards of samples: the source picture if it still exists, the crop, the mask as a shade, and captions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from prep.cache.reader import Reader
from prep.errors import CacheError
from prep.formatting import format_size
from prep.images.decode import decode_picture
from prep.images.formats.parts import BadPicture
from prep.images.thumbnail import encode_jpeg, encode_shade, shrink
from prep.manifest.describe import describe
from prep.manifest.opened import OpenedManifest
from prep.report.pages.frame import Pictures
from prep.report.pages.originals import Originals
from prep.report.pages.parts import Caption, Card, Overlay, Shot

SIDE = 320  # pixels of a thumbnail's longer side
CAPTIONS = 3  # per card
LETTERS = 300  # per caption; prep inspect --sample shows all
VIEWS = 8  # per card
Thumbnail = Callable[[Mapping[str, Any]], bytes | None]  # a described sample → PNG or JPEG of the whole picture


def gallery(audit: OpenedManifest, *, limit: int, thumbnail: Thumbnail, pictures: Pictures) -> list[Card]:
    """Makes `limit` cards, spread evenly over the samples, which are sorted by id."""
    count = len(audit.samples)
    chosen = sorted({count * number // limit for number in range(limit)}) if count else []
    samples = [describe(audit, number) for number in chosen]
    reader = Reader(audit.cache.root)
    cards = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for sample, small in zip(samples, pool.map(thumbnail, samples), strict=True):
            address = pictures.add(small)
            cards.append(_card(sample, address, [pictures.add(one) for one in _masks(reader, sample)]))
    reader.close()
    return cards


def from_sources(audit: OpenedManifest) -> Thumbnail:
    """Makes thumbnails from the manifest's sources; `None` for a picture that is missing or has changed."""
    originals = Originals(audit)

    def thumbnail(sample: Mapping[str, Any]) -> bytes | None:
        data = originals.read(sample)
        try:
            return None if data is None else encode_jpeg(shrink(decode_picture(data, alpha="white"), SIDE))
        except BadPicture:
            return None

    return thumbnail


def _masks(reader: Reader, sample: Mapping[str, Any]) -> list[bytes | None]:
    """Makes a shade for each view shown; `None` without a readable mask (`prep verify` reports why)."""
    return [None if view["mask"] is None else _mask(reader, view["mask"]) for view in sample["views"][:VIEWS]]


def _mask(reader: Reader, place: Mapping[str, Any]) -> bytes | None:
    try:
        spec, _ = reader.array_info(place["shard"], "mask")
        row = np.empty(spec.row_bytes, np.uint8)
        reader.read_into(row, place["shard"], "mask", place["row"])
    except CacheError:
        return None
    return encode_shade(row.reshape(spec.shape[-2:]))


def _card(sample: Mapping[str, Any], address: str, shades: Sequence[str]) -> Card:
    views, texts = sample["views"], sample["texts"]
    overlays = tuple(_overlay(view, sample["bucket"], shade)
                     for view, shade in zip(views, shades, strict=False))  # as many as are shown
    more = (f"{len(views):,} views, {len(overlays)} shown",) if len(views) > len(overlays) else ()
    width, height = sample["size"]
    return Card(
        shot=Shot(name=sample["name"], address=address, size=(width, height), overlays=overlays,
                  instead=f"{format_size(sample['size'])}: the original picture was not found"),
        captions=tuple(Caption(text=one["caption"][:LETTERS], letters=len(one["caption"])) for one in texts[:CAPTIONS]),
        more_captions=max(0, len(texts) - CAPTIONS), part=sample["coverage"],
        facts=(sample["role"], f"{format_size(sample['size'])} to {format_size(sample['bucket'])}", *more))


def _overlay(view: Mapping[str, Any], bucket: Sequence[int], shade: str) -> Overlay:
    """The crop as a box in percent of the whole picture, with its mask."""
    (wide, high), (left, top), (width, height) = view["scaled"], view["crop"], bucket
    return Overlay(left=100 * left / wide, top=100 * top / high, width=100 * width / wide, height=100 * height / high,
                   shade=shade, flip=view["flip"], outlined=True, coarse=True)
