"""Reads those of a manifest's source pictures that still exist, from directories and tars.

A picture is returned only if its digest is the sample's, so that a hostile manifest cannot put other files on a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from prep.digest import digest_bytes
from prep.errors import PathError
from prep.fs.blob import Blob, blob_at, read_blob
from prep.fs.mirror import is_object
from prep.fs.remote.errors import StoreError
from prep.images.decode import Picture, decode_picture
from prep.images.formats.parts import BadPicture
from prep.manifest.opened import OpenedManifest
from prep.sources.item import Item
from prep.sources.readers import readers
from prep.sources.tar_index import Listings
from prep.sources.tars import Tar, walk_tar
from prep.sources.walk import is_tars, tars_at

MOST_BYTES = 1 << 28  # of a picture; larger ones get no thumbnail


class Originals:
    """The sources of a manifest. Threads may share one."""

    def __init__(self, opened: OpenedManifest) -> None:
        self._sources = opened.manifest.sources
        color = opened.manifest.document["latents"].get("alpha")
        self._alpha = "white" if color is None else "#{:02x}{:02x}{:02x}".format(*color)
        self._tars: dict[Path, dict[str, Tar]] = {}  # by source: its tars by label, the first part of members' names
        self._members: dict[str, dict[str, Blob]] = {}
        self._lock = Lock()

    def read(self, sample: Mapping[str, Any]) -> bytes | None:
        """Returns the bytes of a described sample's picture; `None` if it is missing or has changed."""
        root = self._sources[sample["source"]] if sample["source"] < len(self._sources) else None
        if root is None or not _is_below(sample["name"]):
            return None
        try:
            blob = self._blob(root, sample["name"])
            data = None if blob is None or _too_large(blob) else read_blob(blob)
        except (OSError, ValueError, PathError, StoreError):
            return None
        return data if data is not None and digest_bytes(data) == sample["picture"] else None

    def picture(self, sample: Mapping[str, Any], *, alpha: str = "") -> Picture | None:
        """A described sample's picture, decoded; `None` as in `read`, or if it cannot be decoded.

        Transparency is flattened onto the color `alpha`; by default onto that of the latents.
        """
        data = self.read(sample)
        try:
            return None if data is None else decode_picture(data, alpha=alpha or self._alpha)
        except BadPicture:
            return None

    def _blob(self, root: Path, name: str) -> Blob | None:
        if not is_tars(root):
            return blob_at(root, name)
        with self._lock:
            if root not in self._tars:
                self._tars[root] = {tar.label: tar for tar in tars_at(root)}
            tars = self._tars[root]
            label = next((start for start in _starts(name) if start in tars), None)
            return None if label is None else self._inside(tars[label]).get(name)

    def _inside(self, tar: Tar) -> Mapping[str, Blob]:
        """The pictures of a tar by name."""
        if tar.whole.file not in self._members:
            with readers() as workers:
                found = walk_tar(tar, sidecar=False, listings=Listings(), workers=workers)
                self._members[tar.whole.file] = {one.name: one.picture for one in found if isinstance(one, Item)}
        return self._members[tar.whole.file]


def _starts(name: str) -> list[str]:
    """The directories above a name, the longest first."""
    parts = name.split("/")
    return ["/".join(parts[:number]) for number in range(len(parts) - 1, 0, -1)]


def _is_below(name: str) -> bool:
    """Whether a sample's name stays below its source, on any system."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and ":" not in parts[0] and not {"", ".."} & set(parts)


def _too_large(blob: Blob) -> bool:
    if blob.length is None and is_object(blob.file):  # reading it is bounded
        return False
    return (blob.path.stat().st_size if blob.length is None else blob.length) > MOST_BYTES
