"""Reads those of a manifest's source pictures that still exist, from directories and tars.

A picture is returned only if its digest is the sample's, so that a hostile manifest cannot put other files on a page;
so is a reference, whose name may lead out of its sample's source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prep.digest import digest_bytes
from prep.errors import PathError
from prep.export.pictures import PictureFiles
from prep.fs.blob import is_too_large, read_blob
from prep.fs.remote.errors import StoreError
from prep.images.decode import Picture, decode_picture
from prep.images.formats.parts import BadPicture
from prep.manifest.opened import OpenedManifest
from prep.parse import COLORS, alpha_setting, color_below

MOST_BYTES = 1 << 28  # of a picture; larger ones get no thumbnail


class Originals:
    """The sources of a manifest. Threads may share one."""

    def __init__(self, opened: OpenedManifest) -> None:
        self._files = PictureFiles(opened.manifest.sources)
        self._alpha = alpha_setting(color_below(opened.manifest.alpha) or COLORS["white"])

    def read(self, sample: Mapping[str, Any], reference: Mapping[str, Any] | None = None) -> bytes | None:
        """Returns the bytes of a described sample's picture, or of a described reference of it; `None` if it is
        missing or has changed."""
        wanted, find = (sample, self._files.find) if reference is None else (reference, self._files.find_reference)
        try:
            blob = find(sample["source"], wanted["name"])
            data = None if blob is None or is_too_large(blob) else read_blob(blob)
        except (OSError, ValueError, PathError, StoreError):
            return None
        return data if data is not None and digest_bytes(data) == wanted["picture"] else None

    def picture(self, sample: Mapping[str, Any], *, reference: Mapping[str, Any] | None = None, alpha: str = ""
                ) -> Picture | None:
        """A described sample's picture, or a described reference of it, decoded; `None` as in `read`, or if it cannot
        be decoded.

        Transparency is flattened onto the color `alpha`; by default onto that of the latents, or white.
        """
        data = self.read(sample, reference)
        try:
            return None if data is None else decode_picture(data, alpha=alpha or self._alpha)
        except BadPicture:
            return None
