"""What cards of samples show: the source picture if it still exists, small, and the first letters of captions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prep.images.thumbnail import encode_jpeg, encode_webp, shrink
from prep.manifest.opened import OpenedManifest
from prep.pages.originals import Originals

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
