"""Finds the pictures of a manifest's samples, and their references: files, objects in stores, members of tars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

from prep.fs.blob import Blob, blob_at
from prep.fs.place import Place, place_from
from prep.sources.item import Item
from prep.sources.readers import readers
from prep.sources.tar_index import Listings
from prep.sources.tars import Tar, walk_tar
from prep.sources.walk import is_tars, tars_at


class PictureFiles:
    """The pictures of a manifest's sources, by source and name. Threads may share one."""

    def __init__(self, sources: Sequence[Place | None]) -> None:
        self._sources = sources
        self._tars: dict[Place, dict[str, Tar]] = {}  # by source: its tars by label, the first part of members' names
        self._members: dict[str, Mapping[str, Blob]] = {}
        self._lock = Lock()

    def find(self, source: int, name: str) -> Blob | None:
        """The file of a picture; `None` if the place of its source is unknown, its name leads out of the source, or no
        tar has it. Raises `PathError`, `StoreError`, `OSError`, `ValueError`."""
        root = self._sources[source] if source < len(self._sources) else None
        if root is None or not _is_below(name):
            return None
        if not is_tars(root):
            return blob_at(root, name)
        with self._lock:
            if root not in self._tars:
                self._tars[root] = {tar.label: tar for tar in tars_at(root)}
            tars = self._tars[root]
            label = next((start for start in _starts(name) if start in tars), None)
            return None if label is None else self._inside(tars[label]).get(name)

    def find_reference(self, source: int, name: str) -> Blob | None:
        """The file of a reference of a picture of the source, which may be in another directory; `None` as in `find`.

        Whoever reads it must compare its digest: a name in a manifest may lead to any file, as the place of a source.
        Raises as `find`.
        """
        if (own := self.find(source, name)) is not None:
            return own
        root = self._sources[source] if source < len(self._sources) else None
        place = None if root is None else place_from(root, name)
        return None if place is None else blob_at(place)

    def _inside(self, tar: Tar) -> Mapping[str, Blob]:
        """The pictures and references of a tar by name."""
        if tar.whole.file not in self._members:
            with readers() as workers:
                entries = walk_tar(tar, sidecar=False, listings=Listings(), workers=workers)
                self._members[tar.whole.file] = {
                    f"{tar.label}/{blob.member}": blob for entry in entries if isinstance(entry, Item)
                    for blob in (entry.picture, *entry.references)}
        return self._members[tar.whole.file]


def _starts(name: str) -> list[str]:
    """The directories above a name, the longest first."""
    parts = name.split("/")
    return ["/".join(parts[:number]) for number in range(len(parts) - 1, 0, -1)]


def _is_below(name: str) -> bool:
    """Whether a sample's name stays below its source, on any system."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and ":" not in parts[0] and not {"", ".."} & set(parts)
