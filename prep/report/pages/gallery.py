"""Cards of samples: the source picture where it still exists, the crop, the mask as a shade, and the captions."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from prep.cache.reader import Reader
from prep.digest import digest_bytes
from prep.errors import CacheError
from prep.formatting import format_size, printable
from prep.geometry import Placement
from prep.images.decode import decode_picture, encode_png, scale_and_crop
from prep.images.formats.parts import BadPicture
from prep.manifest.describe import describe
from prep.manifest.opened import OpenedManifest

SIDE = 240  # pixels of a thumbnail's longer side
HEIGHT = 320  # pixels of a card's picture, at most
MOST_BYTES = 1 << 28  # of a source picture; a larger one is not worth its thumbnail
Thumbnail = Callable[[Mapping[str, Any]], bytes | None]  # a described sample → PNG or JPEG of the whole picture


def gallery(audit: OpenedManifest, *, limit: int, thumbnail: Thumbnail) -> str:
    """`limit` cards, spread evenly over the samples, which are sorted by id and so in no order of the user's."""
    count = len(audit.samples)
    chosen = sorted({count * number // limit for number in range(limit)}) if count else []
    reader = Reader(audit.cache.root)
    samples = [describe(audit, number) for number in chosen]
    cards = [_card(sample, thumbnail(sample), _masks(reader, sample)) for sample in samples]
    reader.close()
    return (f'<p>{len(chosen)} of {count} samples. Outlined: what training sees of the picture; shaded: what its mask '
            'leaves out. <label><input type="checkbox" id="no-crops"> no outline</label> '
            '<label><input type="checkbox" id="no-masks"> no masks</label></p>\n'
            f'<div class="gallery">\n{"".join(cards)}</div>')


def from_sources(audit: OpenedManifest) -> Thumbnail:
    """Thumbnails from the sources that the manifest names; `None` where the picture is gone or is another by now.

    Shown only when its digest is the sample's, so that a manifest cannot make a page of files it was not made from.
    """
    sources = audit.manifest.sources

    def thumbnail(sample: Mapping[str, Any]) -> bytes | None:
        root = sources[sample["source"]] if sample["source"] < len(sources) else None
        data = None if root is None or not _is_below(sample["name"]) else _read(root / sample["name"])
        if data is None or digest_bytes(data) != sample["picture"]:
            return None
        return _shrunk(data)

    return thumbnail


def _is_below(name: str) -> bool:
    """Whether a sample's name leads to something below its source, on any system."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and ":" not in parts[0] and not {"", ".."} & set(parts)


def no_thumbnail(_: Mapping[str, Any]) -> None:
    """No picture at all."""


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.is_file() and path.stat().st_size <= MOST_BYTES else None
    except (OSError, ValueError):
        return None


def _shrunk(data: bytes) -> bytes | None:
    try:
        picture = decode_picture(data, alpha="white")
    except BadPicture:
        return None
    longer = max(picture.size)
    width, height = (max(1, side * min(SIDE, longer) // longer) for side in picture.size)
    whole = Placement(scaled=(width, height), crop=(0, 0), bucket=(width, height))
    return encode_png(scale_and_crop(picture, whole))


def _masks(reader: Reader, sample: Mapping[str, Any]) -> list[bytes | None]:
    """A PNG of each view's mask; `None` for views without one, or where it cannot be read: `verify` says why."""
    return [None if view["mask"] is None else _mask(reader, view["mask"]) for view in sample["views"]]


def _mask(reader: Reader, place: Mapping[str, Any]) -> bytes | None:
    try:
        spec, _ = reader.array_info(place["shard"], "mask")
        row = np.empty(spec.row_bytes, np.uint8)
        reader.read_into(row, place["shard"], "mask", place["row"])
    except CacheError:
        return None
    return encode_png(row.reshape(spec.shape[-2:]))


def _card(sample: Mapping[str, Any], picture: bytes | None, masks: list[bytes | None]) -> str:
    width, height = sample["size"]
    inside = "".join(_view(view, sample["bucket"], mask) for view, mask in zip(sample["views"], masks, strict=True))
    empty = f'<div class="none">{format_size(sample["size"])}, source not here</div>'
    style = f"aspect-ratio:{width}/{height};width:min(100%,{max(1, HEIGHT * width // height)}px)"
    coverage = "" if sample["coverage"] is None else f", mask {sample['coverage']:.0%}"
    captions = "<br>".join(_words(text["caption"]) for text in sample["texts"])
    shown = empty if picture is None else _image(picture)
    return (f'<figure><div class="frame" style="{style}">{shown}{inside}</div>'
            f"<figcaption><b>{_words(sample['name'])}</b>{captions}"
            f'<div class="facts">{escape(sample["role"])}, {format_size(sample["size"])} to '
            f"{format_size(sample['bucket'])}{coverage}</div></figcaption></figure>\n")


def _view(view: Mapping[str, Any], bucket: Sequence[int], mask: bytes | None) -> str:
    """The crop as a box in percent of the whole picture, with the mask in it."""
    (wide, high), (left, top), (width, height) = view["scaled"], view["crop"], bucket
    box = {"left": left / wide, "top": top / high, "width": width / wide, "height": height / high}
    style = ";".join(f"{name}:{100 * part:.3f}%" for name, part in box.items())
    mirrored = " mirrored" if view["flip"] else ""
    return f'<div class="crop{mirrored}" style="{style}">{"" if mask is None else _image(mask)}</div>'


def _image(data: bytes) -> str:
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return f'<img alt="" src="data:image/{kind};base64,{base64.b64encode(data).decode("ascii")}">'


def _words(text: str) -> str:
    """Text of a file or user, escaped, and kept from turning its neighbours' direction."""
    return f"<bdi>{escape(printable(text))}</bdi>"
